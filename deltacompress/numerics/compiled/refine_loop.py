"""The column loop of refine.py, compiled; see common.py. Imported when it is first used."""

from __future__ import annotations

from typing import Any

import numpy as np

from deltacompress.numerics.compiled.common import (
    CODES,
    LANES,
    compiled,
    inlined,
    load_grid,
    load_tile,
    nearest,
    on_grid,
    placed,
    spread_four,
    spread_one,
    store_pair,
)

_HALF, _TWO = np.float32(0.5), np.float32(2)
_OLD, _GRADIENT, _NEW, _OWN, _PICK, _CODE, _FALL = 0, 4, 8, 12, 15, 16, 18
_SLOTS = 19
"""Where in the lanes' memory a group's values, gradient, new values (at last their changes), grid, pick, codes are, and
by how much the loss has fallen in all groups.

One flat array, at distances that the compiler knows: so it sees that nothing overlaps.
"""


@inlined
def _half(hii: Any, hjj: Any, hij: Any, ci: Any, cj: Any, own: Any, top: Any) -> tuple[Any, Any, Any]:
    """(cost, codes of i and j): the optimum of the two, i rounded first and j given it."""
    scale, step, zero = own
    qi = on_grid((hjj * ci - hij * cj) / (hii * hjj - hij * hij), step, zero, top)
    vi = (qi - zero) * scale
    qj = on_grid((cj - hij * vi) / hjj, step, zero, top)
    vj = (qj - zero) * scale
    return vi * (_HALF * hii * vi - ci) + vj * (_HALF * hjj * vj - cj) + hij * vi * vj, qi, qj


@inlined
def _better(found: Any, swapped: Any, number: Any, present: Any) -> tuple[Any, Any, Any, Any]:
    """(cost, pick, codes): `present`, or the pair `number` where `found` costs less.

    swapped: the codes of `found` are those of the right and the left one.
    """
    cost, qi, qj = found
    best, pick, left, right = present
    lower = cost < best
    if swapped:
        qi, qj = qj, qi
    return (
        cost if lower else best,
        number if lower else pick,
        qi if lower else left,
        qj if lower else right,
    )


@inlined
def _best(h: Any, c: Any, own: Any, top: Any, cost: Any) -> tuple[Any, Any, Any, Any]:
    """(cost, pick, codes) of the least cost below `cost`; pick -1 where there is none."""
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = h
    c0, c1, c2, c3 = c
    at = (cost, np.float32(-1), np.float32(0), np.float32(0))
    at = _better(_half(h00, h11, h01, c0, c1, own, top), False, np.float32(0), at)
    at = _better(_half(h00, h22, h02, c0, c2, own, top), False, np.float32(1), at)
    at = _better(_half(h00, h33, h03, c0, c3, own, top), False, np.float32(2), at)
    at = _better(_half(h11, h22, h12, c1, c2, own, top), False, np.float32(3), at)
    at = _better(_half(h11, h33, h13, c1, c3, own, top), False, np.float32(4), at)
    at = _better(_half(h22, h33, h23, c2, c3, own, top), False, np.float32(5), at)
    at = _better(_half(h11, h00, h01, c1, c0, own, top), True, np.float32(0), at)
    at = _better(_half(h22, h00, h02, c2, c0, own, top), True, np.float32(1), at)
    at = _better(_half(h33, h00, h03, c3, c0, own, top), True, np.float32(2), at)
    at = _better(_half(h22, h11, h12, c2, c1, own, top), True, np.float32(3), at)
    at = _better(_half(h33, h11, h13, c3, c1, own, top), True, np.float32(4), at)
    return _better(_half(h33, h22, h23, c3, c2, own, top), True, np.float32(5), at)


@compiled
def _choose(lanes: Any, h: Any, top: Any) -> None:
    """The new values, pick and codes of a group, from its values, gradient and grid."""
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = h
    for r in range(LANES):
        v0, v1, v2, v3 = lanes[r], lanes[LANES + r], lanes[2 * LANES + r], lanes[3 * LANES + r]
        own = (lanes[_OWN * LANES + r], lanes[(_OWN + 1) * LANES + r], lanes[(_OWN + 2) * LANES + r])
        u0 = h00 * v0 + h01 * v1 + h02 * v2 + h03 * v3
        u1 = h01 * v0 + h11 * v1 + h12 * v2 + h13 * v3
        u2 = h02 * v0 + h12 * v1 + h22 * v2 + h23 * v3
        u3 = h03 * v0 + h13 * v1 + h23 * v2 + h33 * v3
        c0, c1 = u0 - lanes[_GRADIENT * LANES + r], u1 - lanes[(_GRADIENT + 1) * LANES + r]
        c2, c3 = u2 - lanes[(_GRADIENT + 2) * LANES + r], u3 - lanes[(_GRADIENT + 3) * LANES + r]
        cost = v0 * (_HALF * u0 - c0) + v1 * (_HALF * u1 - c1) + v2 * (_HALF * u2 - c2) + v3 * (_HALF * u3 - c3)
        _, pick, left, right = _best(h, (c0, c1, c2, c3), own, top, cost)
        lanes[_PICK * LANES + r], lanes[_CODE * LANES + r], lanes[(_CODE + 1) * LANES + r] = pick, left, right
        one, other = (left - own[2]) * own[0], (right - own[2]) * own[0]
        stays = pick < 0
        lanes[_NEW * LANES + r] = v0 if stays else placed(pick, 0, one, other)
        lanes[(_NEW + 1) * LANES + r] = v1 if stays else placed(pick, 1, one, other)
        lanes[(_NEW + 2) * LANES + r] = v2 if stays else placed(pick, 2, one, other)
        lanes[(_NEW + 3) * LANES + r] = v3 if stays else placed(pick, 3, one, other)


@compiled
def _fall(lanes: Any, h: Any) -> None:
    """Add to the fall of each row's loss what a group with gradient g brings that changes by d: -(2 g d + d H d)."""
    h00, h01, h02, h03, h11, h12, h13, h22, h23, h33 = h
    for r in range(LANES):
        d0, d1 = lanes[_NEW * LANES + r], lanes[(_NEW + 1) * LANES + r]
        d2, d3 = lanes[(_NEW + 2) * LANES + r], lanes[(_NEW + 3) * LANES + r]
        g0, g1 = lanes[_GRADIENT * LANES + r], lanes[(_GRADIENT + 1) * LANES + r]
        g2, g3 = lanes[(_GRADIENT + 2) * LANES + r], lanes[(_GRADIENT + 3) * LANES + r]
        rise = d0 * (_TWO * g0 + h00 * d0 + h01 * d1 + h02 * d2 + h03 * d3)
        rise += d1 * (_TWO * g1 + h01 * d0 + h11 * d1 + h12 * d2 + h13 * d3)
        rise += d2 * (_TWO * g2 + h02 * d0 + h12 * d1 + h22 * d2 + h23 * d3)
        lanes[_FALL * LANES + r] -= rise + d3 * (_TWO * g3 + h03 * d0 + h13 * d1 + h23 * d2 + h33 * d3)


@compiled
def refine_pairs(state: Any, hessian: Any, grid: Any, top: Any, whole: Any, begin: Any, end: Any) -> None:
    """Best pair and codes of each group of four before column `whole`, rows begin..end-1.

    state: gradient, value, codes, mask, change [width, rows] and gain [rows]; the gradient of the columns from `whole`
    on is right then.
    """
    gradient, value, codes, mask, change, gain = state
    tile, lanes = np.empty((gradient.shape[0], LANES), np.float32), np.zeros(_SLOTS * LANES, np.float32)
    slots = lanes.reshape(_SLOTS, LANES)
    old, new, own = slots[_OLD : _OLD + 4], slots[_NEW : _NEW + 4], slots[_OWN : _OWN + 3]
    for row in range(begin, end, LANES):
        count = min(LANES, end - row)
        load_tile(tile, gradient, row, count)
        slots[_FALL] = 0
        for a in range(0, whole, 4):
            x, y, z = hessian[a], hessian[a + 1], hessian[a + 2]
            h = (
                x[a],
                x[a + 1],
                x[a + 2],
                x[a + 3],
                y[a + 1],
                y[a + 2],
                y[a + 3],
                z[a + 2],
                z[a + 3],
                hessian[a + 3, a + 3],
            )
            load_grid(own, grid, a, row, count)
            old[:, :count] = value[a : a + 4, row : row + count]
            slots[_GRADIENT : _GRADIENT + 4] = tile[a : a + 4]
            _choose(lanes, h, top)
            value[a : a + 4, row : row + count] = new[:, :count]
            store_pair(codes, mask, a, row, count, slots[_CODE : _CODE + 2], slots[_PICK])
            new -= old
            change[a : a + 4, row : row + count] = new[:, :count]
            _fall(lanes, h)
            spread_four(tile, hessian, a, a + 4, new)
        gradient[whole:, row : row + count] = tile[whole:, :count]
        gain[row : row + count] += slots[_FALL, :count]


@compiled
def refine_columns(state: Any, hessian: Any, grid: Any, top: Any, first: Any, begin: Any, end: Any) -> None:
    """Kept codes of columns first..width-1 re-rounded to the minimum of their parabolas; the gradient stays."""
    gradient, value, codes, mask, change, gain = state
    width = gradient.shape[0]
    tile, own = np.empty((width, LANES), np.float32), np.empty((3, LANES), np.float32)
    best, new = np.empty(LANES, np.float32), np.zeros(LANES, np.float32)
    code, moved = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
    for row in range(begin, end, LANES):
        count = min(LANES, end - row)
        load_tile(tile, gradient, row, count)
        moved[:] = 0
        for j in range(first, width):
            load_grid(own, grid, j, row, count)
            curve = hessian[j, j]
            for r in range(count):
                best[r] = (curve * value[j, row + r] - tile[j, r]) / curve
            nearest(best, new, code, own, top, CODES)
            for r in range(count):
                kept = mask[j, row + r]
                moved[r] = new[r] - value[j, row + r] if kept else np.float32(0)
                value[j, row + r] = new[r] if kept else value[j, row + r]
                codes[j, row + r] = np.uint8(code[r]) if kept else codes[j, row + r]
                change[j, row + r] = moved[r]
                gain[row + r] -= moved[r] * (_TWO * tile[j, r] + curve * moved[r])
            spread_one(tile, hessian, j, j + 1, moved)
