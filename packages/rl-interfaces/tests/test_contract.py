import pytest
from rl_interfaces import CONTRACT_VERSION, ContractVersionError, check_contract_version

pytestmark = pytest.mark.promise

MAJOR, MINOR = CONTRACT_VERSION


def backend(**attributes):
    return type("Backend", (), attributes)


@pytest.mark.parametrize("minor", range(MINOR + 1))
def test_a_minor_version_that_is_not_newer_is_taken(minor):
    check_contract_version(backend(contract_version=(MAJOR, minor)), owner="acme")


@pytest.mark.parametrize(
    ("version", "upgrade"),
    [
        ((MAJOR, MINOR + 1), "rl-interfaces"),
        ((MAJOR + 1, 0), "rl-interfaces"),
        ((MAJOR - 1, MINOR + 1), "acme"),
    ],
)
def test_another_version_is_refused_with_what_to_upgrade(version, upgrade):
    with pytest.raises(ContractVersionError) as raised:
        check_contract_version(backend(contract_version=version), owner="acme")
    message = str(raised.value)
    assert f"{version[0]}.{version[1]}" in message
    assert f"{MAJOR}.{MINOR}" in message
    assert message.endswith(f"Upgrade {upgrade}")


@pytest.mark.parametrize(
    "attributes", [{}, {"contract_version": "1.0"}, {"contract_version": (1,)}]
)
def test_no_version_is_refused(attributes):
    with pytest.raises(ContractVersionError, match="Backend of acme does not say which contract"):
        check_contract_version(backend(**attributes), owner="acme")
