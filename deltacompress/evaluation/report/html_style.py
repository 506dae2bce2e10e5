"""The look of report.html: one style sheet, light and dark by the reader's own setting, and one for paper."""

from __future__ import annotations

STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf7;--card:#fff;--ink:#1d2330;--soft:#596275;--line:#e3e0d8;--accent:#0b5fad;
--delta:#0b66b8;--finetuned:#1d7a46;--checkpoint:#a8510b;--base:#6f7686;--bad:#b3261e;--good:#1d7a46;--badge-bad:#fbe9e7;
--badge-good:#e6f4ea;--code:#f3f1ea}
@media (prefers-color-scheme:dark){:root{--paper:#14171d;--card:#1c2028;--ink:#e8eaf0;--soft:#a4adbf;--line:#323845;
--accent:#7db8f2;--delta:#6fb3f2;--finetuned:#6ccb8f;--checkpoint:#f0a35e;--base:#a3abbb;--bad:#ff8f86;--good:#6ccb8f;
--badge-bad:#3b2020;--badge-good:#1d3325;--code:#242934}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main,header,footer{max-width:66rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:2.5rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .3rem;letter-spacing:-.01em;text-wrap:balance}
h2{font-size:1.25rem;margin:2.6rem 0 .6rem}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
h1,h3,p,li,figcaption,summary{overflow-wrap:anywhere}
p{margin:.4rem 0;max-width:46rem}
.soft,figcaption,caption{color:var(--soft);font-size:.9rem}
a{color:var(--accent)}
.skip{position:absolute;left:-99rem}.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem}
.verdicts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(19rem,100%),1fr));gap:1rem;
margin:1.4rem 0 0;padding:0}
.verdict{background:var(--card);border:1px solid var(--line);border-left:6px solid var(--base);border-radius:10px;
padding:1rem 1.2rem}
.verdict.pass{border-left-color:var(--good)}.verdict.fail{border-left-color:var(--bad)}
.verdict h2{margin:0 0 .2rem;font-size:1.05rem;overflow-wrap:anywhere}
.badge{display:inline-block;font-weight:650;font-size:.85rem;padding:.1rem .6rem;border-radius:1rem;margin-bottom:.4rem}
.pass .badge{background:var(--badge-good);color:var(--good)}.fail .badge{background:var(--badge-bad);color:var(--bad)}
.none .badge{background:var(--code);color:var(--soft)}
.verdict ul{margin:.5rem 0 0;padding-left:1.1rem;font-size:.92rem}
dl.facts{display:flex;flex-wrap:wrap;gap:.4rem 1.6rem;margin:.7rem 0 0}
dl.facts dt{color:var(--soft);font-size:.8rem}dl.facts dd{margin:0;font-size:1.2rem;font-weight:620;
font-variant-numeric:tabular-nums}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
th,td{padding:.42rem .6rem;text-align:right;white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:.82rem}
th[scope=row],td.text,th.text{text-align:left}td.wrap{white-space:normal;min-width:12rem}
th[scope=row]{position:sticky;left:0;background:var(--card);white-space:normal;overflow-wrap:anywhere;min-width:7rem;
max-width:13rem}
thead th{border-bottom:1px solid var(--line);vertical-align:bottom;white-space:normal}
tbody tr+tr td,tbody tr+tr th{border-top:1px solid var(--line)}
tr.task th{background:var(--code);color:var(--ink);font-size:.92rem;text-align:left;white-space:normal}
.stay{position:sticky;left:.6rem;display:inline-block;max-width:min(100%,calc(100vw - 5rem))}
tr.reference{font-weight:600}
.swatch{display:inline-block;width:.7em;height:.7em;border-radius:2px;margin-right:.5em;background:var(--base)}
.swatch.delta,.swatch.adapter{background:var(--delta);border-radius:50%}.swatch.finetuned{background:var(--finetuned);
transform:rotate(45deg)}.swatch.checkpoint{background:var(--checkpoint)}
.mark-bad{color:var(--bad);font-weight:600}.mark-good{color:var(--good);font-weight:600}
.charts{display:flex;flex-wrap:wrap;gap:1rem}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem 1rem;
max-width:100%;overflow-x:auto;align-self:start}
figcaption{margin-bottom:.4rem;font-weight:600;color:var(--ink)}
svg.chart{display:block;max-width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--ink);paint-order:stroke;stroke:var(--card);stroke-width:3px;stroke-linejoin:round}
svg .tick,svg .axis{fill:var(--soft)}svg .number{font-size:11px;font-weight:650}
svg .grid{stroke:var(--line)}svg .zero{stroke:var(--soft)}
ol.key{margin:.6rem 0 0;padding-left:1.9rem;max-width:21rem;font-size:.88rem;overflow-wrap:anywhere}
svg .margin{stroke:var(--bad);stroke-dasharray:5 4}
svg .whisker{stroke-width:2.4;opacity:.55;stroke:var(--base)}
svg .dot,svg .bar{fill:var(--base)}
svg .delta,svg .adapter{fill:var(--delta)}svg .whisker.delta,svg .whisker.adapter{stroke:var(--delta)}
svg .finetuned{fill:var(--finetuned)}svg .whisker.finetuned{stroke:var(--finetuned)}
svg .checkpoint{fill:var(--checkpoint)}svg .whisker.checkpoint{stroke:var(--checkpoint)}
details{border:1px solid var(--line);border-radius:10px;background:var(--card);margin:.6rem 0;padding:0 1rem}
summary{cursor:pointer;padding:.7rem 0;font-weight:600}
article{border-top:1px solid var(--line);padding:.9rem 0}
pre,code{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:.85rem}
li code{overflow-wrap:anywhere}
pre{background:var(--code);border-radius:6px;padding:.5rem .7rem;margin:.2rem 0;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:16rem;overflow-y:auto}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(15rem,100%),1fr));gap:.6rem}
.answers p{font-size:.85rem;color:var(--soft);margin:.3rem 0 0}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
footer{padding:2.5rem 1.25rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media print{body{background:#fff}.scroll,figure,details,.verdict{break-inside:avoid}pre{max-height:none}}
"""
