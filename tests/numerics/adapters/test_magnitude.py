from __future__ import annotations

import pytest
import torch

from deltacompress.numerics.adapters.magnitude import row_norms


@pytest.mark.parametrize("rows", [3, 16, 17, 50])
def test_norms_of_all_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltacompress.numerics.adapters.magnitude._AT_A_TIME", 16 * 8)
    w, a, b = torch.randn(rows, 8).bfloat16(), torch.randn(2, 8), torch.randn(rows, 2)
    wanted = (w.double() + b.double() @ a.double()).norm(dim=1).float()
    torch.testing.assert_close(row_norms(w, a, b), wanted, rtol=1e-5, atol=1e-6)
