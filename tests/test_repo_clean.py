"""The shell of the project: package metadata, pins, Makefile and docker-compose."""

from __future__ import annotations

import importlib.util
import re
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text("utf-8"))


def requirements(extra: str) -> list[Requirement]:
    """What an extra asks for on this machine, as the installed package says it; "" is the core."""
    parsed = [Requirement(line) for line in requires("ckptstore") or []]
    inside = [one for one in parsed if f'extra == "{extra}"' in str(one.marker).replace("'", '"')]
    wanted = inside if extra else [one for one in parsed if "extra ==" not in str(one.marker)]
    return [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": extra})]


def test_metadata_is_complete() -> None:
    """The package says its licence, its oldest Python and its extras."""
    said = metadata("ckptstore")
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Requires-Python"] == ">=3.10"
    extras = {"accelerate", "jax", "keras", "lightning", "torch", "transformers"}
    extras |= {"adapters", "bench", "docs", "fast", "opentelemetry", "prometheus", "test"}
    assert set(said.get_all("Provides-Extra") or []) == extras


def test_core_has_floors_and_no_ceilings() -> None:
    """A library does not decide for its users how new their other packages may be."""
    core = requirements("")
    assert core
    assert {spec.operator for one in core for spec in one.specifier} == {">="}
    assert [one.name for one in core if not one.specifier] == []


@pytest.mark.parametrize("extra", ["test", "adapters"])
def test_tools_are_pinned_exactly(extra: str) -> None:
    """The same commit gives the same verdict next year."""
    tools = requirements(extra)
    assert tools
    assert [str(one) for one in tools if [spec.operator for spec in one.specifier] != ["=="]] == []


def test_torch_is_installed_where_it_is_pinned() -> None:
    """The torch tests cannot vanish: where the test extra asks for torch, it is there."""
    if not any(one.name == "torch" for one in requirements("test")):
        pytest.skip("no torch wheel for this Python and platform: the torch tests do not run here")
    assert importlib.util.find_spec("torch") is not None, "pip install -e '.[test]'"


def test_version_is_written_once() -> None:
    """Only pyproject.toml holds the version."""
    pattern = re.compile(r"__version__\s*=\s*[\"']")
    assert [path for path in (ROOT / "ckptstore").rglob("*.py") if pattern.search(path.read_text("utf-8"))] == []


def test_make_lists_its_targets() -> None:
    """``make help`` describes every target that one can ask for."""
    text = (ROOT / "Makefile").read_text("utf-8")
    phony = " ".join(re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)).split()
    assert "demo" in phony
    assert set(phony) == set(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_images_are_pinned(name: str) -> None:
    """No image floats: each names a registry and a release."""
    image = COMPOSE["services"][name]["image"]
    default = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", image)
    assert re.fullmatch(r"[a-z.]+/[a-z-]+/[a-z-]+:(RELEASE\.[\dTZ-]+|\d+\.\d+\.\d+)", default), default


def test_ports_are_on_loopback() -> None:
    """The test servers, whose passwords are public, can be reached from this machine only."""
    ports = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]
    assert sorted(ports) == ["127.0.0.1:4443:4443", "127.0.0.1:9000:9000"]


def test_servers_have_health_checks_and_buckets_wait_for_them() -> None:
    """A bucket is made when its server answers, and ``up -d`` returns when both are made."""
    services = COMPOSE["services"]
    assert [name for name, one in services.items() if "ports" in one and "healthcheck" not in one] == []
    for server in ("minio", "gcs"):
        assert services[f"{server}-bucket"]["depends_on"] == {server: {"condition": "service_healthy"}}
        assert services["ready"]["depends_on"][f"{server}-bucket"] == {"condition": "service_completed_successfully"}
