from rl_interfaces import resolve_policy_config
from rl_policy.policy_inputs import with_absolute_paths


def test_paths_mean_the_same_in_another_directory(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    lora = {"enabled": True, "adapter_path": "adapters"}
    given = {"model_name": "model", "profile_dir": "profiles", "dtensor_cfg": {"lora": lora}}
    config = with_absolute_paths(resolve_policy_config(given))
    assert config["model_name"] == str(tmp_path / "model")
    assert config["profile_dir"] == str(tmp_path / "profiles")
    assert config["dtensor_cfg"]["lora"]["adapter_path"] == str(tmp_path / "adapters")
    assert config["dtensor_cfg"]["lora"]["enabled"] is True
    assert with_absolute_paths(config) == config


def test_a_name_on_a_hub_stays_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_absolute_paths(resolve_policy_config({"model_name": "org/model"}))
    assert config["model_name"] == "org/model"
    assert config["dtensor_cfg"]["lora"].get("adapter_path") is None
