"""What drawing needs beyond the core: imported before anything else of it, so that its absence is one sentence."""

from __future__ import annotations

from importlib.util import find_spec

from evolute.errors import MissingExtraError


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # a module without a spec
        return False


MISSING = [name for name in ("matplotlib", "jinja2", "markupsafe") if not _there(name)]
if MISSING:
    raise MissingExtraError(f"figures and pages need {' and '.join(MISSING)}: pip install 'evolute[report]'")
