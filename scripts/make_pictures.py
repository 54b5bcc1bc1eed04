"""The pictures of the README, from a stored run: the live panel as an animation, and the top of the report.

    bash train.sh sokoban trainer.total_training_steps=60 trainer.test_freq=20
    PYTHONPATH=src .venv/bin/python scripts/make_pictures.py checkpoints/RAGEN/pocket-sokoban

Writes docs/pictures/panel.svg, panel_narrow.svg (for phones), report.png and report_narrow.png. The panel is the real
one (`ragen.run.console.LiveConsole`), fed with the run's metrics and episodes; only the time between frames is made up.
The animation is CSS in one SVG file, which a README shows in an <img>. The report needs a Chromium (--browser).
"""

import argparse
import io
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.color import Color, ColorType
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.terminal_theme import TerminalTheme

from ragen.config.tree import build
from ragen.env.base import Tag
from ragen.env.registry import make
from ragen.report.run_report import write_report
from ragen.run.console import LiveConsole
from ragen.run.episode_view import SECONDS_A_SCENE
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder

PICTURES = Path(__file__).parents[1] / "docs/pictures"
CELL_WIDTH, LINE_HEIGHT, FONT_SIZE, MARGIN = 8.4, 17, 14, 12
SECONDS_A_FRAME = 1.1
BACKGROUND = "#0d1117"
THEME = TerminalTheme(
    (13, 17, 23),
    (201, 209, 217),
    [
        (72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34),
        (88, 166, 255), (188, 140, 255), (57, 197, 207), (177, 186, 196),
    ],
    [
        (110, 118, 129), (255, 161, 152), (86, 211, 100), (227, 179, 65),
        (121, 192, 255), (210, 168, 255), (86, 212, 221), (240, 246, 252),
    ],
)  # fmt: skip
FONTS = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
Line = list[Segment]


# --- the frames of the panel --------------------------------------------------------------------------------------


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def frames(folder: RunFolder, width: int, num_steps: int) -> Iterator[list[Line]]:
    """What the panel shows over the run: of each chosen step one episode, turn by turn."""
    config, rows = folder.read_config(), folder.read_metrics().rows
    total, name, model = rows[-1]["step"], config["trainer"]["experiment_name"], config["model_path"]
    screen = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system="truecolor")
    clock = Clock()
    panel = LiveConsole(total, str(folder), f"{name} · {model}", 0, screen, clock)
    files = {file.step: file.path for file in folder.episode_files("train")}
    trained = [row for row in rows if row["step"] in files]
    shown = {trained[round(index * (len(trained) - 1) / (num_steps - 1))]["step"] for index in range(num_steps)}
    for row in rows:
        if any(key.startswith("val-env/") for key in row):
            panel.validation(row["step"], row)
        clock.now += row.get("timing_s/step", 0.0)
        panel.step(row["step"], row)
        if row["step"] not in shown:
            continue
        episodes = read_episodes(files[row["step"]])
        record = episodes[row["step"] % len(episodes)]  # not chosen by its outcome
        tag = build(Tag, config["custom_envs"][record["tag"]])
        panel.episode(record, make(tag).symbols())
        start, num_frames = clock.now, len(record["turns"]) + 2  # the end twice
        with nullcontext() if row is rows[-1] else panel.phase("rollout", total=len(episodes)):
            for index in range(num_frames):
                clock.now = start + min(index, num_frames - 2) * SECONDS_A_SCENE
                panel.advance(len(episodes) * (index + 1) // num_frames - len(episodes) * index // num_frames)
                yield screen.render_lines(panel.render(), screen.options.update(width=width), pad=True)
        clock.now = start


# --- SVG ----------------------------------------------------------------------------------------------------------


def animation(shown: list[list[Line]], width: int, name: str) -> str:
    """Every distinct line once; a frame is a list of lines, visible for its share of the time."""
    height = max(map(len, shown))
    lines: dict[str, str] = {}  # what is drawn -> its id
    groups = []
    for index, frame in enumerate(shown):
        uses = []
        for row, line in enumerate(frame):
            drawn = "".join(_texts(line))
            key = lines.setdefault(drawn, f"l{len(lines)}")
            uses.append(f'<use href="#{key}" y="{row * LINE_HEIGHT}"/>')
        last = " last" if index == len(shown) - 1 else ""
        delay = f"{index * SECONDS_A_FRAME - len(shown) * SECONDS_A_FRAME:g}s"
        groups.append(f'<g class="frame{last}" style="animation-delay:{delay}">{"".join(uses)}</g>')
    defined = "".join(f'<g id="{key}">{drawn}</g>' for drawn, key in lines.items())
    size = (round(width * CELL_WIDTH + 2 * MARGIN), height * LINE_HEIGHT + 2 * MARGIN)
    hidden, share = "{visibility:hidden}", f"{100 / len(shown):.4f}%"
    style = (
        f"text{{font-family:{FONTS};font-size:{FONT_SIZE}px;white-space:pre}}"
        f".frame{{visibility:hidden;animation:show {len(shown) * SECONDS_A_FRAME:g}s steps(1) infinite}}"
        f".last{{visibility:visible}}@keyframes show{{0%{{visibility:visible}}{share}{hidden}100%{hidden}}}"
        "@media (prefers-reduced-motion:reduce){.frame{animation:none}}"
    )
    shape = f'viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" height="{size[1]}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {shape} role="img" aria-label="{escape(name)}">'
        f"<style>{style}</style><defs>{defined}</defs>"
        f'<rect width="100%" height="100%" rx="10" fill="{BACKGROUND}"/>'
        f'<g transform="translate({MARGIN},{MARGIN})">{"".join(groups)}</g></svg>\n'
    )


def _texts(line: Line) -> Iterator[str]:
    """One text for each stretch of one style. `textLength` keeps columns in place with any font."""
    column = 0
    for segment in Segment.simplify(line):
        size = cell_len(segment.text)
        if segment.text.strip():
            style = segment.style or Style()
            attributes = [f'x="{column * CELL_WIDTH:.1f}"', f'y="{FONT_SIZE}"', f'fill="{_colour(style)}"']
            attributes.append(f'textLength="{size * CELL_WIDTH:.1f}"')
            attributes += ['font-weight="700"'] if style.bold else []
            attributes += ['font-style="italic"'] if style.italic else []
            yield f"<text {' '.join(attributes)}>{escape(segment.text)}</text>"
        column += size


def _colour(style: Style) -> str:
    colour = style.color or Color.default()
    rgb = colour.get_truecolor(THEME) if colour.type != ColorType.DEFAULT else THEME.foreground_color
    if style.dim:
        rgb = tuple(
            round(0.62 * part + 0.38 * behind) for part, behind in zip(rgb, THEME.background_color, strict=True)
        )
    return "#{:02x}{:02x}{:02x}".format(*rgb)


# --- the report ---------------------------------------------------------------------------------------------------


def photograph(browser: str, page: Path, picture: Path, width: int, height: int, scale: int) -> None:
    """The top of a page, as a browser of this size shows it."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            f"--window-size={width},{height}", f"--force-device-scale-factor={scale}", f"--screenshot={picture}",
            page.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the directory of a finished run")
    parser.add_argument("--output", type=Path, default=PICTURES, help="where the pictures go")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome") or "")
    options = parser.parse_args()
    folder = RunFolder(options.run)
    for name, width, num_steps in (("panel", 100, 4), ("panel_narrow", 44, 4)):
        text = animation(
            list(frames(folder, width, num_steps)), width, "The live panel of a run, with the agent playing"
        )
        (options.output / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"{options.output / f'{name}.svg'}: {len(text) / 1e3:.0f} kB")
    if not options.browser:
        print("no Chromium found: the pictures of the report stay as they are")
        return 0
    page = write_report(folder)
    for name, size, scale in (("report", (960, 880), 2), ("report_narrow", (390, 1096), 2)):
        photograph(options.browser, page, options.output / f"{name}.png", *size, scale)
        print(options.output / f"{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
