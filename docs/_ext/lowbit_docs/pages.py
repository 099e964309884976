"""The pages of modules: one for each, written when the documentation is built, in the folders of the packages."""

from collections.abc import Iterator
from pathlib import Path

from sphinx.application import Sphinx

ROOTS = {
    "spec": ("lowbit",),
    "backends": ("lowbit_numpy", "lowbit_cppyy", "lowbit_cuda", "lowbit_gpusim", "lowbit_torch", "lowbit_foreign"),
}
"""The packages whose modules have pages, by the folder that they are in."""

FOLDER = "reference"
COMMAND_LINE = ("lowbit.cli", "lowbit.__main__")
"""Not part of the specification; `lowbit --help` documents it."""


def modules(repository: Path) -> Iterator[tuple[str, bool]]:
    """The full name of each module that has a page, and whether it is a package."""
    for root, packages in ROOTS.items():
        for package in packages:
            for file in sorted((repository / root / package).rglob("*.py")):
                parts = file.relative_to(repository / root).with_suffix("").parts
                is_package = parts[-1] == "__init__"
                name = ".".join(parts[:-1] if is_package else parts)
                if not name.startswith(COMMAND_LINE) and parts[-1] != "__main__":
                    yield name, is_package


def page_of(name: str, is_package: bool) -> str:
    """The document of a module: ``reference/lowbit/quantization/packing``."""
    path = f"{FOLDER}/{name.replace('.', '/')}"
    return f"{path}/index" if is_package else path


def text_of(name: str, children: list[str]) -> str:
    """The source of a page: the chapter, and for a package the pages of what is in it."""
    text = f".. chapter:: {name}\n"
    if children:
        text += "\n.. toctree::\n   :maxdepth: 1\n\n" + "".join(f"   /{child}\n" for child in children)
    return text


def write_pages(app: Sphinx) -> None:
    """Write all pages, leave those that have not changed, and remove those of modules that are gone."""
    source = Path(app.srcdir)
    found = dict(modules(source.parent))
    written = set[Path]()
    for name, is_package in found.items():
        inside = [each for each in found if each.rpartition(".")[0] == name]
        page = source / f"{page_of(name, is_package)}.rst"
        text = text_of(name, [page_of(each, found[each]) for each in inside])
        page.parent.mkdir(parents=True, exist_ok=True)
        if not page.is_file() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")
        written.add(page)
    for page in (source / FOLDER).rglob("*.rst"):
        if page not in written:
            page.unlink()
