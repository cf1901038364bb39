"""Records commands in a terminal and draws the recording as an animated SVG.

Usage: record_demo.py FILE

Types COMMANDS into a shell on a pseudo terminal, with `a2a-bridge` on PATH and NATS_URL set, and writes
what the terminal shows, and when, to FILE. scripts/record-demo starts the bridge and runs this program.
Standard library only.
"""
import codecs
import collections
import fcntl
import html
import os
import pathlib
import pty
import re
import select
import struct
import sys
import tempfile
import termios
import time

# What to type, each with the text to wait for first: None is the shell's prompt.
COMMANDS = [
    (None, "a2a-bridge agents"),
    (None, "a2a-bridge skills"),
    (None, "a2a-bridge call demo.echo 'Hello, NATS'"),
    (None, "a2a-bridge call demo.stream --stream 'Each word arrives as soon as the agent has sent it.'"),
    (None, "a2a-bridge call demo.report -p topic=tides -p audience=sailors"),
    ("> ", "Markdown"),
]
COLUMNS, ROWS = 100, 60
# Seconds: the wait for the terminal, the pauses before typing and after the last command, and between keys.
TIMEOUT, PAUSE, FINAL_PAUSE, KEY = 20, 1.1, 6.0, 0.032
# Before each prompt the shell reports the exit code of the last command, as terminals with shell integration expect it.
PROMPT = re.compile(rb"\x1b]133;D;(\d+)\x07")
PS1 = r"\n\[\e]133;D;$?\a\e[32m\]$\[\e[0m\] "

# Pixels.
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, MARGIN, TITLE_BAR = 8.4, 18, 14, 16, 34
FOREGROUND, BACKGROUND, BORDER, TITLE = "#e6edf3", "#0d1117", "#30363d", "#8b949e"
# The eight ANSI colours, then their bright forms.
PALETTE = ["#6e7681", "#ff7b72", "#3fb950", "#d29922", "#58a6ff", "#bc8cff", "#39c5cf", "#b1bac4",
           "#8b949e", "#ffa198", "#56d364", "#e3b341", "#79c0ff", "#d2a8ff", "#56d4dd", "#ffffff"]


def record():
    """Types the commands; returns the output as a list of (seconds since the start, bytes)."""
    environment = {
        "PATH": os.environ["PATH"], "NATS_URL": os.environ["NATS_URL"], "PS1": PS1, "TERM": "xterm-256color",
        "LANG": "C.UTF-8", "HOME": "/", "HISTFILE": "", "BASH_SILENCE_DEPRECATION_WARNING": "1",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        # Without line editing the terminal echoes what is typed, and the shell redraws nothing.
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "--noediting", "-i"], environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    chunks, started = [], time.monotonic()
    output = bytearray()  # since the last command

    def read_for(seconds):
        end = time.monotonic() + seconds
        while select.select([terminal], [], [], max(end - time.monotonic(), 0))[0]:
            data = os.read(terminal, 65536)
            chunks.append((time.monotonic() - started, data))
            output.extend(data)

    def wait_for(text):
        pattern = re.compile(re.escape(text.encode())) if text else PROMPT
        deadline = time.monotonic() + TIMEOUT
        while not (match := pattern.search(output)):
            if time.monotonic() > deadline:
                sys.exit(f"the terminal did not show {text or 'a prompt'!r} within {TIMEOUT} s: {bytes(output)!r}")
            read_for(0.05)
        if not text and match[1] != b"0":
            sys.exit(f"a command failed with exit code {match[1].decode()}: {bytes(output)!r}")

    def type_key(key):
        os.write(terminal, key.encode())
        read_for(KEY)

    try:
        for text, command in COMMANDS:
            wait_for(text)
            read_for(PAUSE)
            for key in command:
                type_key(key)
            output.clear()
            type_key("\n")
        wait_for(None)
        read_for(PAUSE)
    finally:
        os.close(terminal)  # the shell gets a hang-up signal and exits
        os.waitpid(pid, 0)
    return chunks


class Style(collections.namedtuple("Style", "bold dim underline colour", defaults=(False, False, False, None))):
    """How a character looks; `colour` is an index into PALETTE."""

    def select(self, code):
        """The style after an SGR code."""
        if code == 0:
            return Style()
        if code in (1, 2, 4):
            return self._replace(**{{1: "bold", 2: "dim", 4: "underline"}[code]: True})
        if code == 22:
            return self._replace(bold=False, dim=False)
        if code == 24:
            return self._replace(underline=False)
        if 30 <= code <= 37 or 90 <= code <= 97:
            return self._replace(colour=code - 30 if code < 90 else code - 82)
        if code == 39:
            return self._replace(colour=None)
        raise ValueError(f"unknown text style {code}")

    def classes(self):
        names = [name[0] for name in ("bold", "dim", "underline") if getattr(self, name)]
        return " ".join(names + ([f"c{self.colour}"] if self.colour is not None else []))


class Screen:
    """A terminal that remembers when each character appeared and disappeared."""

    # OSC and CSI sequences, control characters, and everything else.
    TOKEN = re.compile(r"\x1b\][^\x07]*\x07|\x1b\[([?\d;]*)([@-~])|[\x00-\x1f]|[^\x00-\x1f]+")

    def __init__(self):
        self.row = self.column = 0
        self.style = Style()
        self.cells = collections.defaultdict(list)  # (row, column): [(time, character, style)]
        self.cursor = []  # [(time, row, column)]

    def feed(self, now, text):
        end = 0
        for token in self.TOKEN.finditer(text):
            if token.start() != end:
                raise ValueError(f"unknown escape sequence: {text[end:]!r}")
            end = token.end()
            self.take(now, token)
        if end != len(text):
            raise ValueError(f"unknown escape sequence: {text[end:]!r}")
        self.cursor.append((now, self.row, self.column))

    def take(self, now, token):
        text = token[0]
        if text == "\r":
            self.column = 0
        elif text == "\n":
            self.row += 1
        elif text == "\b":
            self.column = max(self.column - 1, 0)
        elif token[2] == "m":
            for code in token[1].split(";"):
                self.style = self.style.select(int(code or 0))
        elif token[2] == "K" and token[1] in ("", "0"):
            for row, column in list(self.cells):
                if row == self.row and column >= self.column:
                    self.cells[row, column].append((now, " ", Style()))
        elif text[0] >= " ":
            for character in text:
                if self.column == COLUMNS:
                    self.row, self.column = self.row + 1, 0
                self.cells[self.row, self.column].append((now, character, self.style))
                self.column += 1
        elif not text.startswith("\x1b]") and token[1][:1] != "?":
            raise ValueError(f"unknown control sequence {text!r}")
        if self.row >= ROWS:
            raise ValueError(f"the output has more than {ROWS} lines")

    def runs(self):
        """Groups characters: {(from, until): [(row, column, text, style)]}; `until` is None at the end."""
        groups = collections.defaultdict(list)
        for row, column in sorted(self.cells):
            versions = self.cells[row, column]
            for (start, character, style), following in zip(versions, versions[1:] + [(None,)]):
                group = groups[start, following[0]]
                if group and group[-1][0] == row and group[-1][3] == style and column == group[-1][1] + len(group[-1][2]):
                    group[-1] = (row, group[-1][1], group[-1][2] + character, style)
                else:
                    group.append((row, column, character, style))
        return groups

    def lines(self):
        """The text at the end of the recording."""
        lines = [[" "] * COLUMNS for _ in range(self.row + 1)]
        for (row, column), versions in self.cells.items():
            lines[row][column] = versions[-1][1]
        return ["".join(line).rstrip() for line in lines]


def play(chunks):
    """Feeds the recording to a screen, on a timeline that begins with the first prompt."""
    screen, decoder = Screen(), codecs.getincrementaldecoder("utf-8")()
    now, last, held = 0.0, None, ""
    for when, data in chunks:
        # Rounding removes the jitter of the recording, so that two recordings differ little.
        now += 0 if last is None else round(when - last, 2)
        last = when
        text = held + decoder.decode(data)
        # A sequence can be cut by the end of a read.
        cut = text.rfind("\x1b")
        held = text[cut:] if cut >= 0 and not Screen.TOKEN.match(text, cut) else ""
        screen.feed(round(now, 2), text[:len(text) - len(held)])
    return screen, now + FINAL_PAUSE


def number(value):
    return f"{value:.2f}".rstrip("0").rstrip(".")


def draw(screen, duration):
    """The SVG. Without animation it shows the end of the recording."""
    first = next(row for row, line in enumerate(screen.lines()) if line)
    width = COLUMNS * CELL_WIDTH + 2 * MARGIN
    height = (screen.row + 1 - first) * CELL_HEIGHT + TITLE_BAR + 2 * MARGIN - 4

    def position(row, column):
        return column * CELL_WIDTH, (row - first) * CELL_HEIGHT

    def percent(seconds):
        return number(100 * seconds / duration) + "%"

    styles, groups = [], []
    for index, ((start, end), runs) in enumerate(sorted(screen.runs().items(), key=lambda item: item[0][0])):
        texts = []
        for row, column, text, style in runs:
            column += len(text) - len(text.lstrip())
            if not (text := text.strip()):
                continue
            x, y = position(row, column)
            classes = f' class="{style.classes()}"' if style.classes() else ""
            # The length keeps columns aligned in any font.
            texts.append(f'<text x="{number(x)}" y="{number(y + FONT_SIZE)}" textLength="{number(len(text) * CELL_WIDTH)}"'
                         f'{classes}>{html.escape(text, quote=False)}</text>')
        if not texts:
            continue
        disappears = "" if end is None else f"{percent(end)}{{opacity:0}}"
        styles.append(f"@keyframes k{index}{{0%{{opacity:0}}{percent(start)}{{opacity:1}}{disappears}}}"
                      f"#k{index}{{animation-name:k{index}{'' if end is None else ';opacity:0'}}}")
        groups.append(f'<g id="k{index}">{"".join(texts)}</g>')

    def translate(row, column):
        x, y = position(row, column)
        return f"transform:translate({number(x)}px,{number(y)}px)"

    moves = {percent(when): translate(row, column) for when, row, column in screen.cursor}
    frames = "".join(f"{when}{{{move}}}" for when, move in moves.items())
    last = translate(*screen.cursor[-1][1:])
    colours = "".join(f".c{index}{{fill:{colour}}}" for index, colour in enumerate(PALETTE)
                      if any(style.colour == index for versions in screen.cells.values() for _, _, style in versions))
    dots = "".join(f'<circle cx="{x}" cy="{TITLE_BAR // 2}" r="5.5" fill="{colour}"/>'
                   for x, colour in ((20, "#ff5f57"), (39, "#febc2e"), (58, "#28c840")))
    newline = "\n"
    return f'''<svg xmlns="http://www.w3.org/2000/svg" width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}" role="img" xml:space="preserve">
<title>a2a-bridge in a terminal</title>
<style>
text{{font:{FONT_SIZE}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono","Liberation Mono",monospace;fill:{FOREGROUND};white-space:pre}}
.b{{font-weight:bold}}.d{{opacity:.6}}.u{{text-decoration:underline}}{colours}.t{{fill:{TITLE};text-anchor:middle}}
g>g,#cursor{{animation:{number(duration)}s step-end infinite}}
#cursor{{fill:{FOREGROUND};opacity:.7;animation-name:cursor;{last}}}
@keyframes cursor{{{frames}}}
{newline.join(styles)}
@media (prefers-reduced-motion:reduce){{g>g,#cursor{{animation:none!important}}}}
</style>
<rect x=".5" y=".5" width="{number(width - 1)}" height="{number(height - 1)}" rx="8" fill="{BACKGROUND}" stroke="{BORDER}"/>
{dots}<text class="t" x="{number(width / 2)}" y="{TITLE_BAR // 2 + 5}">a2a-bridge</text>
<path d="M.5 {TITLE_BAR}.5H{number(width - .5)}" stroke="{BORDER}"/>
<g transform="translate({MARGIN} {TITLE_BAR + MARGIN - 4})">
{newline.join(groups)}
<rect id="cursor" width="{CELL_WIDTH}" height="{CELL_HEIGHT - 1}"/>
</g>
</svg>
'''


def main():
    screen, duration = play(record())
    text = "\n".join(screen.lines())
    root = pathlib.Path(__file__).resolve().parent.parent
    for private in (str(root), str(pathlib.Path.home()), tempfile.gettempdir()):
        if len(private) > 1 and private in text:
            sys.exit(f"the recording shows a path of this machine ({private}):\n{text}")
    picture = pathlib.Path(sys.argv[1])
    picture.write_text(draw(screen, duration), encoding="utf-8")
    print(text)
    print(f"{picture}: {picture.stat().st_size / 1024:.0f} KiB, {duration:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
