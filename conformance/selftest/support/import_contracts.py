"""A contract for import-linter that its own types do not cover; pyproject.toml uses it.

`acyclic_siblings` finds circles among the modules and folders of one folder. It does not see a module that imports the
package that it is in, where the package imports that module. This contract sees every circle of single modules.
"""

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class AcyclicModules(Contract):
    """No module imports itself through others, packages included."""

    type_name = "acyclic_modules"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Search for a way back along every import."""
        circles: dict[frozenset[str], tuple[str, ...]] = {}
        for importer in graph.modules:
            for imported in graph.find_modules_directly_imported_by(importer):
                if chain := graph.find_shortest_chain(imported, importer):
                    circles.setdefault(frozenset(chain), chain)
        return ContractCheck(kept=not circles, metadata={"circles": sorted(circles.values())})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Each circle in a line."""
        for chain in check.metadata["circles"]:
            output.print_error(" -> ".join([*chain, chain[0]]))
