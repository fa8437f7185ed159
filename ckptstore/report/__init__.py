"""A report on a repository: ``collect`` the facts, and make them a ``page`` that opens in any browser, or JSON."""

from ckptstore.report.data import as_dict
from ckptstore.report.facts import EXAMPLE, Facts, collect
from ckptstore.report.page import page

__all__ = ["EXAMPLE", "Facts", "as_dict", "collect", "page"]
