"""YAML as job files are written in: mappings of plain values, and no surprises.

Unlike PyYAML's own reading, `3e-4` is a number, a key that is given twice is an error, and dates stay text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from dataloader.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with its own copy of the resolvers, so that PyYAML elsewhere in the process stays as it is."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (the base class declares it so)
        first: [(tag, rule) for tag, rule in rules if not tag.endswith((":float", ":timestamp"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:[0-9][0-9_]*)?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*\.(?:[eE][-+]?[0-9]+)?
        |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
        |[-+]?\.(?:inf|Inf|INF)
        |\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def parse(text: str, where: str) -> Any:
    """The value in a YAML text. Raises ConfigError `where:line: what is wrong`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None and "\n" in text else ""
        problem = error.problem or error.context or "not YAML"
        raise ConfigError(f"{where}{line}: {_one_line(problem)}; mend the YAML there") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not YAML: {_one_line(str(error))}") from None


def dump(value: Any) -> str:
    """The YAML text of plain values, in their order."""
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=110)


def _one_line(text: str) -> str:
    return " ".join(text.split())
