"""Documents out of files, one at a time: plain text, JSON lines (packed or not), parquet, standard input.

Text in the wild is impolite: bytes that are no UTF-8, byte-order marks, half lines, missing fields. Each of them is
either refused with its file and line, or passed by a rule that the user asked for and that is counted.
"""
import contextlib
import gzip
import importlib
import json
import sys
import sysconfig
import zlib
from pathlib import Path

KINDS = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
STDIN = ("-", "-.jsonl")
SKIPPED = "malformed lines skipped"
SPLITS = ("line", "paragraph")


def text_files(paths):
    """Every file named, and every file of KINDS below every folder named, in sorted order. - is standard input as one
    document, -.jsonl as JSON lines."""
    files = []
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(KINDS))
            if not found:
                raise ValueError(f"--text={path} holds no {', '.join(KINDS[:-1])} or {KINDS[-1]} file")
            files += found
        elif path.is_file() or str(path) in STDIN:
            if path.suffix in (".gz", ".zst", ".zip", ".bz2", ".xz") and not path.name.endswith(KINDS):
                raise ValueError(f"--text={path} is packed; unpack it, or give {', '.join(KINDS)}")
            files.append(path)
        else:
            raise ValueError(f"--text={path} does not exist; give a file or a folder")
    return files


def decode(raw, errors, where, counts, start_of_file=False):
    """bytes -> str. A byte-order mark is dropped at the start of a file only; line ends stay as they are."""
    if start_of_file and raw.startswith(b"\xef\xbb\xbf"):
        raw, counts["byte-order marks dropped"] = raw[3:], counts["byte-order marks dropped"] + 1
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        if errors != "replace":
            raise ValueError(f"{where}: byte {e.start} ({raw[e.start]:#04x}) is no UTF-8; "
                             "convert the file, or give --errors=replace") from None
        counts["documents with bytes replaced"] += 1
        return raw.decode("utf-8", "replace")


def lines(file, disk):
    """The lines of an open file, unpacked if its name ends in .gz or .zst."""
    broken = EOFError, OSError, zlib.error
    try:
        if file.name.endswith(".zst"):
            zstandard = optional("zstandard", file)
            broken = *broken, zstandard.ZstdError
            yield from unpack_zst(zstandard.ZstdDecompressor(), disk)
        else:
            yield from gzip.open(disk) if file.name.endswith(".gz") else disk
    except broken as e:
        raise ValueError(f"{file} cannot be read to its end ({e}); fetch or pack it again") from None


def unpack_zst(unpacker, disk):
    """The lines of a .zst file, frame by frame: zstandard's own reader takes a file cut short for a whole one."""
    frame, rest = None, b""
    while packed := disk.read(1 << 16):
        while packed:
            frame = frame or unpacker.decompressobj()
            *whole, rest = (rest + frame.decompress(packed)).split(b"\n")
            yield from whole
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame:
        raise EOFError("the file ends inside a frame")
    yield rest


def optional(package, file):
    """Import what only some kinds of files need, or ask for it by name."""
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(f"{file} needs the package {name}: pip install {name}") from None


def json_text(line, where, cfg, counts, start_of_file):
    """[the text in one JSON line], or [] where the line is malformed and may be skipped."""
    line = decode(line, cfg.errors, where, counts, start_of_file)
    try:
        record = json.loads(line)
        return [record[cfg.text_key] if isinstance(record, dict) else None]
    except KeyError:
        raise ValueError(f"{where} has no field {cfg.text_key!r}, only {sorted(record)}; "
                         "name it with --text_key=FIELD") from None
    except (ValueError, RecursionError) as e:       # no JSON, a number of 5,000 digits, brackets ten thousand deep
        counts[SKIPPED] += 1
        if counts[SKIPPED] > cfg.skip_bad:
            raise ValueError(f"{where} is no JSON ({getattr(e, 'msg', e)}); mend it, "
                             "or skip up to N such lines with --skip_bad=N") from None
        return []


def records(file, cfg, counts, progress):
    """Yield (text, where it stands) for every document of one file: a whole plain file, a JSON line, a parquet row."""
    if file.name.endswith(".parquet"):
        parquet = optional("pyarrow.parquet", file)
        try:
            table = parquet.ParquetFile(file)
            if cfg.text_key not in table.schema_arrow.names:
                raise ValueError(f"{file} has no column {cfg.text_key!r}, only {sorted(table.schema_arrow.names)}; "
                                 "name it with --text_key=FIELD")
            row = 0
            for batch in table.iter_batches(1024, columns=[cfg.text_key]):
                progress(file.stat().st_size * len(batch) // table.metadata.num_rows)
                for row, text in enumerate(batch.column(0).to_pylist(), row + 1):
                    yield text, f"{file}, row {row}"
        except (optional("pyarrow", file).ArrowException, OSError) as e:
            raise ValueError(f"{file} cannot be read to its end ({e}); fetch it again") from None
        return
    with open(file, "rb") if str(file) not in STDIN else contextlib.nullcontext(sys.stdin.buffer) as disk:
        if not file.name.endswith(KINDS[1:]):
            raw = disk.read()
            progress(len(raw))
            yield decode(raw, cfg.errors, str(file), counts, start_of_file=True), str(file)
            return
        packed, before, at = not file.name.endswith(".jsonl"), 0, 0
        for number, line in enumerate(lines(file, disk), 1):
            at += len(line)
            now = disk.tell() if packed else at
            progress(now - before)
            before, where = now, f"{file}, line {number}"
            if line.strip():
                yield from ((text, where) for text in json_text(line, where, cfg, counts, number == 1))


def mend_surrogates(text):
    """Each lone surrogate, legal in JSON but not in UTF-8, becomes U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def pieces(text, split):
    """A text as documents: its lines, or its runs of lines that are not blank. What is blank is thrown away."""
    run = []
    for line in (*text.split("\n"), ""):
        if line.strip():
            run.append(line.rstrip())
        if run and (split == "line" or not line.strip()):
            yield "\n".join(run)
            run = []


def documents(files, cfg, counts, progress=lambda n: None):
    """Yield the text of every document. A lone surrogate (legal in JSON, not in UTF-8) becomes U+FFFD."""
    for file in files:
        for text, where in records(file, cfg, counts, progress):
            if not isinstance(text, str):
                raise ValueError(f"{where}: the field {cfg.text_key!r} must hold a text; "
                                 "name another one with --text_key=FIELD")
            try:
                text.encode()
            except UnicodeEncodeError:
                text = mend_surrogates(text)
                counts["documents with lone surrogates replaced"] += 1
            if cfg.split:
                yield from pieces(text, cfg.split)
            else:
                yield text


def embedded_files():
    """The .py files of this interpreter's standard library, without tests and installed packages: text that every
    machine has. Another Python version is another corpus, so its fingerprint is printed with every result."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
