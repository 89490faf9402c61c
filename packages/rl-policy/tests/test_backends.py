import sys

import pytest
from rl_interfaces import CONTRACT_VERSION, ContractVersionError
from rl_policy import backends

pytestmark = pytest.mark.promise

WORKER = f"class Worker:\n    contract_version = {CONTRACT_VERSION}\n"
MAJOR, MINOR = CONTRACT_VERSION


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package which registers one backend."""

    def add(distribution, backend, target, source=None, group="rl_policy.workers"):
        module = target.split(":")[0]
        info = tmp_path / f"{distribution}-1.0.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        (info / "METADATA").write_text(metadata)
        (info / "entry_points.txt").write_text(f"[{group}]\n{backend} = {target}\n")
        if source is not None:
            (tmp_path / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)

    monkeypatch.syspath_prepend(tmp_path)
    return add


def test_a_registered_backend_is_loaded(install):
    install("acme", "acme", "acme_worker:Worker", WORKER)
    assert backends.load("acme").__module__ == "acme_worker"
    assert "acme" in backends.installed_backends()


def test_a_missing_backend_says_how_to_install_it(install, without_megatron):
    install("acme", "acme", "acme_worker:Worker", WORKER)
    present = ", ".join(backends.installed_backends())
    with pytest.raises(ValueError, match="is not installed") as raised:
        backends.load("megatron")
    assert str(raised.value) == (
        'The "megatron" backend is not installed. Install it with: '
        f'pip install "rl-policy[megatron]" (installed backends: {present})'
    )
    assert isinstance(raised.value, ImportError)


def test_a_missing_third_party_backend_names_the_entry_point_group():
    with pytest.raises(ImportError, match="entry-point group") as raised:
        backends.load("nowhere")
    assert "rl-policy[nowhere]" not in str(raised.value)


def test_a_broken_backend_raises_its_own_error(install):
    install("broken", "broken", "broken_worker:Worker", "import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there") as raised:
        backends.load("broken")
    assert not isinstance(raised.value, backends.BackendNotInstalledError)


def test_two_packages_with_one_name_are_both_named(install):
    install("first", "twin", "first_worker:Worker", WORKER)
    install("second", "twin", "second_worker:Worker", WORKER)
    with pytest.raises(ValueError, match="registered more than once") as raised:
        backends.load("twin")
    assert "first (first_worker:Worker)" in str(raised.value)
    assert "second (second_worker:Worker)" in str(raised.value)


def test_the_enabled_section_names_the_backend():
    config = {"dtensor_cfg": {"enabled": False}, "acme_cfg": {"enabled": True}}
    assert backends.enabled_backend(config) == "acme"


def test_no_enabled_section_is_refused():
    config = {"model_name": "m", "dtensor_cfg": {"enabled": False}, "acme_cfg": {}}
    with pytest.raises(ValueError, match="no backend is enabled") as raised:
        backends.enabled_backend(config)
    for key in ("dtensor_cfg", "megatron_cfg", "acme_cfg"):
        assert f"policy.{key}.enabled" in str(raised.value)


def test_two_enabled_sections_are_both_named():
    config = {"dtensor_cfg": {"enabled": True}, "megatron_cfg": {"enabled": True}}
    message = "policy.dtensor_cfg.enabled=True and policy.megatron_cfg.enabled=True"
    with pytest.raises(ValueError, match=message):
        backends.enabled_backend(config)


GROUPS = {"rl_policy.workers": backends.load, "rl_policy.generation": backends.load_engine}


@pytest.mark.parametrize("group", GROUPS)
def test_a_backend_for_this_contract_is_loaded(install, group):
    install("acme", "acme", "acme_backend:Worker", WORKER, group)
    assert GROUPS[group]("acme").contract_version == CONTRACT_VERSION


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("version", "upgrade"),
    [
        ((MAJOR, MINOR + 1), "rl-interfaces"),
        ((MAJOR + 1, 0), "rl-interfaces"),
        ((MAJOR - 1, 9), "acme 1.0"),
    ],
)
def test_a_backend_for_another_contract_is_refused(install, group, version, upgrade):
    source = f"class Worker:\n    contract_version = {version}\n"
    install("acme", "acme", "acme_backend:Worker", source, group)
    with pytest.raises(ContractVersionError) as raised:
        GROUPS[group]("acme")
    assert str(raised.value) == (
        f"Worker of acme 1.0 was written for version {version[0]}.{version[1]} of the contract, "
        f"and this rl-interfaces has version {MAJOR}.{MINOR}. Upgrade {upgrade}"
    )
    assert isinstance(raised.value, ImportError)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("body", ["pass", "contract_version = '1.0'", "contract_version = (1,)"])
def test_a_backend_that_names_no_contract_is_refused(install, group, body):
    install("acme", "acme", "acme_backend:Worker", f"class Worker:\n    {body}\n", group)
    with pytest.raises(ContractVersionError, match="does not say which contract") as raised:
        GROUPS[group]("acme")
    assert str(CONTRACT_VERSION) in str(raised.value)
    assert "Upgrade acme 1.0" in str(raised.value)
