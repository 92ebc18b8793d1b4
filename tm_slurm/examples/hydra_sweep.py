"""Hydra composes the configurations of several jobs, its submitit launcher submits them; all survive drains.

    python -m tm_slurm.examples.hydra_sweep --config-dir configs/hydra --config-name char_gpt \\
        --multirun train.options.learning_rate=1e-3,3e-3

Needs the extra `hydra`. What runs in the launcher's job is the controller of launch mode `allocation`.
"""

from __future__ import annotations

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from tm_slurm.submit import controller


@hydra.main(version_base="1.3", config_path=None)  # type: ignore[untyped-decorator]
def main(composed: DictConfig) -> int:
    """Control one job of the sweep to its end. SystemExit with the controller's code if that is not 0."""
    path = Path(HydraConfig.get().runtime.output_dir) / "tm_slurm.yaml"
    path.write_text(OmegaConf.to_yaml(composed, resolve=True))
    code = controller.main([str(path)])
    if code:
        raise SystemExit(code)
    return code


if __name__ == "__main__":
    main()
