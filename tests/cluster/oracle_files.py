"""Valid and invalid topology.conf files for the oracle: hand-written and random."""

from __future__ import annotations

import random
from collections.abc import Mapping

_S1 = "SwitchName=s1 Nodes=n1\n"

#: values of LinkSpeed; Slurm reads them with strtoul(3), base 0, and a suffix k for 1024
_SPEEDS = ["0", "1", "800", "8000", "0x1000", "010000", "09", "5K", "5k", "5m", "5kk", "k", "UNLIMITED", "infinite",
           "+5000", "-1", "4294967295", "4294967296", "4194303k", "4194304k", "9" * 30, '"5000"', '" 5000"',
           '"5000 "', '""', "fast", "1.5"]

#: lines that follow `SwitchName=s1 Nodes=n1`
_LINES = [
    "SwitchName = s2  Nodes = n2", "SwitchName=s2\tNodes\t=\tn2\r", "  switchNAME=s2 NODES=n2",
    "SwitchName=S1 Nodes=n2",
    "SwitchName=s2 LinkSpeed=7000 Nodes=n2", "SwitchName=s2 Nodes=n2 LinkSpeed=5000 LinkSpeed=6000",
    "SwitchName=s2 Nodes=n2 LinkSpeed=-1 LinkSpeed=6000", "SwitchName=s2 Nodes=n2 LinkSpeed=09 LinkSpeed=6000",
    "SwitchName=s2\vNodes=n2",
    "SwitchName=s2 Nodes=n2 nodes=n3", "SwitchName=s2 Nodes=n2 SwitchName=s3", "Nodes=n2 SwitchName=s2", "Nodes=n2",
    # quoted and empty values, and values with special characters
    'SwitchName=s2 Nodes="n2, n3"', 'SwitchName=s2 Nodes="n2"x', 'SwitchName=s2 Nodes="n2', 'SwitchName=s2 Nodes=n2"',
    'SwitchName=s2 Nodes="a b"c', "SwitchName=s2 Nodes='n2,n3'", 'SwitchName="s 2" Nodes=n2',
    'SwitchName="" Nodes=n2',
    'SwitchName=s2 Nodes=n"2"', "SwitchName= Nodes=n2", "SwitchName=s2 Nodes=", "SwitchName=s2 Nodes= n2",
    "SwitchName=s2 Nodes=n2 Switches=", "SwitchName=s2 Nodes= Switches=s1", "SwitchName=s2 Nodes=n2 Nodes=",
    'SwitchName=s2 Nodes="" Switches=s1', 'SwitchName=s2 Nodes=""', 'SwitchName=s2 Switches=""', "SwitchName=s2",
    "SwitchName==s2 Nodes=n2", "SwitchName=s2 Nodes=n=2", "SwitchName=s2 Nodes+=n2", "SwitchName-=s2 Nodes=n2",
    "SwitchName=s2 Nodes=n2;LinkSpeed=3000", "SwitchName=s2 Nodes=n2\u00a0LinkSpeed=3000",
    "\u00a0SwitchName=s2 Nodes=n2",
    "SwitchName=zon\u00e4 Nodes=n2", "SwitchName=s2 Nodes=n2 Schl\u00fcssel=3", "SwitchName=s2 Nodes=n2 Foo.Bar=3",
    "SwitchName=s2 Nodes=n2 Foo=3", "SwitchName=s2 Nodes=n2 foo", "SwitchName=s2 Nodes=n2 =", "foo", "foo=", "=s2",
    "SwitchName", "SwitchName s2 Nodes=n2", "SwitchName=s2 Nodes=n2\rSwitchName=s3 Nodes=n3", "\x1c", "\x1f x",
    # comments, escapes, continuations
    "SwitchName=s2 Nodes=n2#x", "SwitchName=s2 Nodes=n2\\#x", "SwitchName=s2 Nodes=n2\\\\#x", '"#"',
    'SwitchName=s2 Nodes="n2#x"', 'SwitchName=s2 Nodes="n2\\#x"', "SwitchName=s2 Nodes=a\\b",
    "SwitchName=s2 Nodes=a\\\\b",
    "SwitchName=s2 Nodes=n2 \\ LinkSpeed=3000", "SwitchName=s2 Nodes=n2 \\", "SwitchName=s2 Nodes=n2\\", "\\",
    "SwitchName=s2 Nodes=n2 \\\n\n", "SwitchName=s2 Nodes=n2 \\  \n LinkSpeed=4000", "SwitchName=s2 Nodes=n2\\\n,n3",
    "SwitchName=s2 Nodes=n2 # c \\\n LinkSpeed=4000", "# c \\\nSwitchName=s2 Nodes=n2", "\\\nSwitchName=s2 Nodes=n2",
    "SwitchName=s2 Nodes=n2\\\\\n,n3", "SwitchName=s2 Nodes=n2\\\\\\\n,n3", "SwitchName=s2 Nodes=n2#\\\n,n3",
    "SwitchName=s2 Nodes=n2\\#\\\n,n3", "  \\\n\n  \nSwitchName=s2 Nodes=n2", "SwitchName=s2 Nodes=\n n2",
    "Switch\\\nName=s2 Nodes=n2",
    # hostlists
    "SwitchName=s2 Nodes=n2,n2", "SwitchName=s2 Nodes=n1,n2", "SwitchName=s2 Nodes=,n2", "SwitchName=s2 Nodes=n2,,n3",
    "SwitchName=s2 Nodes=,", "SwitchName=s2 Nodes=n[2-3],n[5-4]", "SwitchName=s2 Nodes=n[2-9:2]",
    "SwitchName=s2 Nodes=n[]",
    "SwitchName=s2 Nodes=n[2", "SwitchName=s2 Nodes=n]", "SwitchName=s2 Nodes=[n2", "SwitchName=s2 Nodes=n[2-3]]",
    "SwitchName=s2 Nodes=n[[2-3]]", "SwitchName=s2 Nodes=n[2,]", "SwitchName=s2 Nodes=n[2-3]x[4-5]",
    "SwitchName=s2 Nodes=n{2}",
    "SwitchName=s2 Nodes=n[1-70000]", "SwitchName=s2 Nodes=n[a]", "SwitchName=s2 Nodes=n[1-" + "9" * 20 + "]",
    "SwitchName=s2 Nodes=zz[1-4]", "SwitchName=s2 Nodes=ALL", "SwitchName=s2 Nodes=n[2,4,6-8]",
    "SwitchName=s2 Nodes=n[02]",
    # trees
    "SwitchName=s1 Nodes=n2", "SwitchName=t Switches=s1", "SwitchName=t Switches=s1,s1", "SwitchName=t Switches=S1",
    "SwitchName=t Switches=t", "SwitchName=t Switches=s1,t", "SwitchName=t Switches=u", "SwitchName=t Switches=,",
    "SwitchName=t Switches=s1,", 'SwitchName=t Switches="s1 "', "SwitchName=t Switches=s[1",
    "SwitchName=t Switches=s1 Nodes=n2",
    "SwitchName=a Switches=b\nSwitchName=b Switches=a", "SwitchName=a Switches=b,s1\nSwitchName=b Switches=a",
    "SwitchName=t Switches=s[1-2]\nSwitchName=s2 Nodes=n2", "SwitchName=t Switches=s1\nSwitchName=u Switches=s1,t",
    "SwitchName=t Switches=s[1-2]\nSwitchName=s[1-2] Nodes=n2", "SwitchName=x,y Nodes=n2\nSwitchName=t Switches=x,y",
    "SwitchName=t Switches=l[1-3]\nSwitchName=l1 Nodes=n2\nSwitchName=l2 Nodes=n3\nSwitchName=l3 Nodes=,",
    "SwitchName=t Switches=s1\nSwitchName=u Switches=s1\nSwitchName=v Switches=t,u", "Include missing.conf",
    "SwitchName=e Nodes=,\nSwitchName=t Switches=e",
]

HAND_WRITTEN: list[Mapping[str, bytes]] = [
    *({"topology.conf": f"SwitchName=s1 Nodes=n[1-4] LinkSpeed={speed}\n".encode()} for speed in _SPEEDS),
    *({"topology.conf": f"{_S1}{line}\n".encode()} for line in _LINES),
    *({"topology.conf": f"{_S1}{line}".encode()} for line in _LINES if "\\" in line),
    *({"topology.conf": text} for text in (
        b"", b"\n", b"# nothing\n", b"\0" * 100, b"\xef\xbb\xbf" + _S1.encode(), _S1.encode() + b"\0\0",
        _S1.encode() + b"SwitchName=s\xff Nodes=n2\n",
        _S1.encode() + b"SwitchName=s2 Nodes=n2\0 x\nSwitchName=s3 Nodes=n3",
        _S1.encode().replace(b"\n", b"\r\n"), b"a" * 100_000, b"SwitchName=s1 Nodes=" + b",".join(
            b"n%d" % i for i in range(1, 20_000)))),
    *({"topology.conf": f"{line}\n".encode(), "a.conf": _S1.encode()} for line in (
        "Include a.conf", "include\ta.conf", " Include a.conf", "INCLUDE a.conf # x", "Include a.conf b.conf",
        "Include  ",
        "Include=a.conf", "Include 'a.conf'", 'Include "a.conf"', "Include topology.conf", "Inc\\\nlude a.conf",
        "Include a.conf\nInclude a.conf", "Included a.conf", "Include ./a.conf", "Include a.c*", "Include a\\.conf",
        "Include",
        "SwitchName=t Switches=s1\nInclude a.conf", "Include /dev/null", "Include .")),
    {"topology.conf": b"Include a.conf\n", "a.conf": b"Include b.conf\n", "b.conf": _S1.encode()},
    {"topology.conf": b"Include a.conf\n", "a.conf": b""}, {"topology.conf": b"Include a.conf\n", "a.conf": b"foo\n"},
    {"topology.conf": b"Include a.conf\nSwitchName=s2 Nodes=n2\n", "a.conf": b"SwitchName=s1 Nodes=n1 \\\n"},
]


def random_files(random: random.Random) -> Mapping[str, bytes]:
    """Return the files of a random forest over the nodes, in random spelling; about half of them have an error."""
    lines = _forest(random)
    if random.random() < 0.3:
        random.shuffle(lines)
    for _ in range(random.choice((0, 0, 0, 1, 1, 2))):
        _add_error(random, lines)
    text = "".join(_format_line(random, line) for line in lines)
    files = {}
    if random.random() < 0.2:
        cut = random.randrange(len(lines) + 1)
        files["more.conf"] = "".join(_format_line(random, line) for line in lines[cut:]).encode()
        text = "".join(_format_line(random, line) for line in lines[:cut]) + "Include more.conf\n"
    if random.random() < 0.1 and text:  # one byte removed, doubled or changed
        position = random.randrange(len(text))
        replacement = random.choice(("", text[position] * 2, random.choice('=,[]-\\#" \t\nxN0')))
        text = text[:position] + replacement + text[position + 1:]
    return {"topology.conf": text.encode(), **files}


def _forest(random: random.Random) -> list[list[tuple[str, str]]]:
    """Return lines of (key, value) pairs: leaf switches over some of the nodes, then higher levels of switches."""
    nodes = list(range(1, 41))
    lines, roots, number = [], [], 0
    while nodes and number < random.randint(1, 9):
        size = random.randint(1, 10)
        members, nodes = nodes[:size], nodes[size:]
        if random.random() < 0.15:
            members = [*members, random.randint(1, 44)]  # in two leaves, or not in the cluster
        name = f"s{number}"
        lines.append([("SwitchName", name), ("Nodes", _hostlist(random, "n", members))])
        roots.append(name)
        number += 1
    while len(roots) > 1 and random.random() < 0.7:
        count = random.randint(1, len(roots))
        children, roots = roots[:count], roots[count:]
        name = f"s{number}"
        numbers = [int(child[1:]) for child in children]
        if random.random() < 0.1:
            numbers.append(random.randrange(number))  # a second parent
        lines.append([("SwitchName", name), ("Switches", _hostlist(random, "s", numbers))])
        roots.append(name)
        number += 1
    for line in lines:
        if random.random() < 0.3:
            line.insert(random.randint(1, 2), ("LinkSpeed", random.choice(("1", "10", "800", "0", "2k", "0x20"))))
    return lines


def _hostlist(random: random.Random, prefix: str, numbers: list[int]) -> str:
    """Return the names prefix + number as a partly folded hostlist in random order."""
    words, position = [], 0
    while position < len(numbers):
        end = position + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        words.append(f"{numbers[position]}-{numbers[end - 1]}" if end - position > 1 else str(numbers[position]))
        position = end
    random.shuffle(words)
    if random.random() < 0.5:
        return f"{prefix}[{','.join(words)}]"
    return ",".join(f"{prefix}[{word}]" if "-" in word or random.random() < 0.3 else f"{prefix}{word}"
                    for word in words)


def _add_error(random: random.Random, lines: list[list[tuple[str, str]]]) -> None:
    line = random.choice(lines)
    name = line[0][1]
    kind = random.randrange(12)
    if kind == 0:
        lines.append(list(line))  # duplicate
    elif kind == 1:
        lines.remove(line) if len(lines) > 1 else None  # may leave a child without a declaration
    elif kind == 2:
        children = random.choice((name, f"{name},up", "nowhere", f"{name},{name}"))
        lines.append([("SwitchName", "up"), ("Switches", children)])
    elif kind == 3:
        line.append(random.choice((("Nodes", "n9"), ("Switches", name), ("Color", "red"), ("SwitchName", "x"))))
    elif kind == 4:
        value = random.choice(("", "n[", "n[3-1]", "n[1,,2]", "n[1-3", '"n1 n2"', "n[x]", ",", "n1,"))
        line[-1] = (line[-1][0], value)
    elif kind == 5:
        line.append(("LinkSpeed", random.choice(_SPEEDS)))
    elif kind == 6:
        lines.append([("SwitchName", "c1"), ("Switches", "c2")])
        lines.append([("SwitchName", "c2"), ("Switches", random.choice(("c1", name)))])
    elif kind == 7:
        del line[random.randrange(len(line))]
        line or lines.remove(line)
    elif kind == 8:
        line[0] = (random.choice(("Switch", "BlockSize", "SwitchName2", "swITchname")), name)
    elif kind == 9:
        lines.append([("SwitchName", "empty"), ("Nodes", random.choice(("", '""', ",")))])
    elif kind == 10:
        random.shuffle(line)
    else:
        line.append(("Nodes", "n[1-2]"))


def _format_line(random: random.Random, line: list[tuple[str, str]]) -> str:
    """Return a line of a file with random case, blanks, quotes, comments and continuations."""
    words = []
    for key, value in line:
        key = random.choice((key, key, key, key.lower(), key.upper()))
        if random.random() < 0.1:
            value = f'"{value}"'
        words.append(key + random.choice(("=", "=", "=", " = ", "= ", " =")) + value)
    text = random.choice(("", "", "", "  ")) + random.choice((" ", " ", "  ", "\t", " \\\n", " \\ \n  ")).join(words)
    if random.random() < 0.1 and "," in text:
        text = text.replace(",", ",\\\n", 1)
    return text + random.choice(("", "", "", " ", " # note", "#x \\", "\r", " \\\n")) + "\n"


def random_hostlist(random: random.Random) -> str:
    """Return a random hostlist with words, groups, padding and separators; about a third have an error."""
    words = []
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        word = random.choice(("n", "n", "rack-1.n", "", "a_b", "N", "n0", "zon\u00e4"))
        for _ in range(random.choice((0, 1, 1, 1, 2, 2, 3, 4))):
            word += f"[{_ranges(random)}]" + random.choice(("", "b", "-", ".", "x0"))
        if "]" in word and random.random() < 0.96:
            word = word[:word.rindex("]") + 1]
        words.append(word or "login")
    text = words[0]
    for word in words[1:]:
        text += random.choice((*",,,,,,,,,", ",,", " ", " ", "\t", ", ", "\n")) + word
    for _ in range(random.choice((0, 0, 0, 0, 1, 2))):
        position = random.randrange(len(text) + 1)
        text = text[:position] + random.choice(("", *"[],-:0 9x{@!")) + text[position + random.choice((0, 1)):]
    return text.lstrip("-")  # scontrol would read an option


def _ranges(random: random.Random) -> str:
    parts = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        low = random.choice((random.randrange(12), random.randrange(120), 10 ** random.randrange(15)))
        width = random.choice((0, 0, 1, 2, 3, 5))
        high = low + random.choice((0, 1, 2, 5, 9, 9, -1 if random.random() < 0.2 else 3))
        last = f"-{max(high, 0):0{random.choice((0, width))}}" if random.random() < 0.6 else ""
        parts.append(f"{low:0{width}}{last}")
    return ",".join(parts)
