"""The style sheet of the report: light and dark, wide and narrow, nothing loaded from elsewhere."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --text: #1d2125; --soft: #626a73; --rule: #e3e4e1; --grid: #ececea;
  --s0: #0b6bb8; --s1: #c8540a; --s2: #0a8060; --s3: #8a4fb0; --s4: #6b7280;
  --good: #0a7d4f; --bad: #b3261e; --flat: #5b6570; --good-bg: #e3f3ea; --bad-bg: #fbe6e4; --flat-bg: #eceef0;
  --think: #f1f1ee; --answer: #fff1c9; --board: #f3f5f7; --before: #b9c3cc;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1c2024; --text: #e6e8ea; --soft: #9aa3ac; --rule: #31363c; --grid: #2a2f34;
    --s0: #5fb0f5; --s1: #f2955a; --s2: #4fcfa5; --s3: #c695ea; --s4: #9aa3ac;
    --good: #5fd39c; --bad: #ff8a80; --flat: #aab3bc; --good-bg: #16352a; --bad-bg: #43211f; --flat-bg: #2a3037;
    --think: #252a2f; --answer: #4a3d12; --board: #15191d; --before: #56616b;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 28px 20px 60px; max-width: 1160px; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; overflow-wrap: anywhere;
}
h1 { font-size: 1.15rem; font-weight: 600; margin: 0; }
h2 { font-size: 1.15rem; font-weight: 600; margin: 40px 0 10px; }
h3 { font-size: .95rem; font-weight: 600; margin: 18px 0 8px; }
p { margin: 6px 0; }
.soft { color: var(--soft); }
.small { font-size: .85rem; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; }
header dl { display: flex; flex-wrap: wrap; gap: 4px 26px; margin: 10px 0 18px; }
header dl div { display: flex; gap: 7px; align-items: baseline; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; }
.verdict { border-left: 6px solid var(--flat); padding: 18px 22px; }
.verdict.good { border-left-color: var(--good); }
.verdict.bad { border-left-color: var(--bad); }
.verdict .headline { font-size: 1.6rem; line-height: 1.25; font-weight: 650; margin: 0 0 10px; }
.verdict.good .headline { color: var(--good); }
.verdict.bad .headline { color: var(--bad); }
.verdict .health { font-size: 1.05rem; font-weight: 600; margin: 0 0 6px; }
.verdict.warned .health { color: var(--bad); }
figure { margin: 0; }
figcaption { display: flex; justify-content: space-between; gap: 12px; align-items: baseline; font-weight: 600;
  font-size: .92rem; margin-bottom: 4px; }
figcaption .value { font-weight: 400; color: var(--soft); white-space: nowrap; font-variant-numeric: tabular-nums; }
figure .note { color: var(--soft); font-size: .8rem; margin: 2px 0 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(310px, 1fr)); gap: 14px; margin-top: 14px; }
.validation { display: grid; grid-template-columns: 2fr 1fr; gap: 14px; margin-top: 14px; }
.validation > :only-child { grid-column: 1 / -1; }
.charts .card { padding: 12px 14px 8px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font: 11px system-ui, sans-serif; }
.narrow { display: none; }
.tick { fill: var(--soft); }
.tick.strong { fill: var(--text); font-size: 12px; }
.grid { stroke: var(--grid); }
.axis { stroke: var(--soft); stroke-opacity: .6; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.thin { stroke-width: 1; stroke-opacity: .32; }
.line.s0, .key.s0 { stroke: var(--s0); } .line.s1, .key.s1 { stroke: var(--s1); stroke-dasharray: 6 3; }
.line.s2, .key.s2 { stroke: var(--s2); stroke-dasharray: 2 3; } .line.s3, .key.s3 { stroke: var(--s3); }
.line.s3, .key.s3 { stroke-dasharray: 9 3 2 3; } .line.s4, .key.s4 { stroke: var(--s4); }
.band { fill-opacity: .15; stroke: none; }
.band.s0, .dot.s0, .label.s0 { fill: var(--s0); } .band.s1, .dot.s1, .label.s1 { fill: var(--s1); }
.band.s2, .dot.s2, .label.s2 { fill: var(--s2); } .band.s3, .dot.s3, .label.s3 { fill: var(--s3); }
.band.s4, .dot.s4, .label.s4 { fill: var(--s4); }
.label { font-size: 12px; font-weight: 600; }
.label.level { fill: var(--soft); font-weight: 400; }
.level { stroke: var(--soft); stroke-dasharray: 4 4; }
text.level { stroke: none; }
.hover { fill: transparent; }
.hover:hover { fill: var(--text); fill-opacity: .25; }
.nonfinite { stroke: var(--bad); stroke-width: 1.5; fill: none; }
.bar.b0 { fill: var(--before); } .bar.b1 { fill: var(--s0); }
.line.whisker-line { stroke-width: 1.5; }
.whisker { stroke: var(--text); stroke-opacity: .65; fill: none; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 14px; font-size: .8rem; color: var(--soft); font-weight: 400; }
.legend span { display: inline-flex; align-items: center; gap: 5px; }
.legend svg { width: 20px; height: 8px; }
.swatch { display: inline-block; width: 12px; height: 12px; border-radius: 2px; }
.swatch.b0 { background: var(--before); } .swatch.b1 { background: var(--s0); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
tr:last-child td { border-bottom: none; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td code { font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
td svg { width: 110px; height: 22px; }
section > details { margin-top: 14px; }
details > summary { cursor: pointer; padding: 4px 0; }
details > summary::marker { color: var(--soft); }
.level-pair { margin-top: 14px; }
.level-pair > h3 { margin: 0 0 10px; display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: baseline; }
.level-pair > h3 .soft { font-weight: 400; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 10px 28px; }
.episode > .top { display: flex; flex-wrap: wrap; gap: 4px 10px; align-items: baseline; font-size: .88rem; }
.badge { border-radius: 20px; padding: 1px 10px; font-weight: 600; font-size: .8rem; }
.badge.good { background: var(--good-bg); color: var(--good); }
.badge.bad { background: var(--bad-bg); color: var(--bad); }
.badge.flat { background: var(--flat-bg); color: var(--flat); }
.turn { display: flex; gap: 12px; padding: 10px 0; border-top: 1px solid var(--rule); margin-top: 8px; }
.turn > .what { flex: 1 1 0; min-width: 0; }
pre.board { flex: none; align-self: flex-start; margin: 0; padding: 8px 10px; border-radius: 8px; max-width: 58%;
  background: var(--board); font: 13px/1.28 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  tab-size: 1; white-space: pre-wrap; overflow-wrap: anywhere; }
pre.board.drawn { font-size: 16px; line-height: 1.2; letter-spacing: .4em; padding: 8px 5px 8px 12px; max-width: none;
  white-space: pre; }
.reply { white-space: pre-wrap; font-size: .9rem; }
.reply .think { background: var(--think); color: var(--soft); border-radius: 5px; padding: 1px 4px;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.reply .answer { background: var(--answer); border-radius: 5px; padding: 1px 4px; font-weight: 600;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }
.reply .mark { white-space: nowrap; opacity: .55; font-weight: 400; font-size: .85em; }
.outcome { color: var(--soft); font-size: .8rem; margin-top: 6px; }
.outcome .bad { color: var(--bad); font-weight: 600; }
.c-wall, .c-empty { color: var(--soft); opacity: .55; }
.c-target, .c-goal { color: var(--s1); font-weight: 700; }
.c-box { color: var(--s3); font-weight: 700; }
.c-hole, .c-player-in-hole { color: var(--bad); font-weight: 700; }
.c-box-on-target, .c-player-on-goal { color: var(--good); font-weight: 700; }
.c-player, .c-player-on-target { color: var(--s0); font-weight: 700; }
footer { margin-top: 44px; color: var(--soft); font-size: .8rem; }
@media (max-width: 860px) { .validation { grid-template-columns: 1fr; } }
@media (max-width: 640px) {
  body { padding: 18px 12px 40px; }
  .wide { display: none; } .narrow { display: block; }
  .verdict { padding: 14px 15px; } .verdict .headline { font-size: 1.3rem; }
  .card { padding: 12px; }
  .charts { grid-template-columns: 1fr; }
  .turn:not(:has(.drawn)) { flex-direction: column; gap: 8px; } pre.board { max-width: 100%; }
  .turn:not(:has(.drawn)) > .what { width: 100%; flex: none; }
  .wide-cell { display: none; }
}
@media print { .card { break-inside: avoid; } }
"""
