"""`TableReach` simulated by MuJoCo: the gripper has mass and is driven by servos, so it lags behind its commands.

Spaces, instruction and reward are those of `TableReach`. Images are drawn by `TableRenderer` from MuJoCo's state, which
needs no OpenGL and gives the same bits everywhere. `camera="mujoco"` uses MuJoCo's own renderer instead, which needs
headless OpenGL (`MUJOCO_GL=egl` or `osmesa`, set before Python starts). Needs `pip install 'palaestra[mujoco]'`.
"""

from __future__ import annotations

from typing import Any, Literal

import mujoco  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from palaestra.env.table.physics import BLOCK_RADIUS, GRIPPER_RADIUS, clip_to_table
from palaestra.env.table.tasks import NUM_BLOCKS, RGB, TableReach
from palaestra.errors import ConfigError

_SUBSTEPS = 15
"""Simulation steps of 5 ms per action."""
_CAMERA_HEIGHT = 2.0

_XML = f"""
<mujoco model="table">
  <option timestep="0.005" gravity="0 0 0"><flag contact="disable"/></option>
  <visual><headlight ambient="0.6 0.6 0.6" diffuse="0.4 0.4 0.4" specular="0 0 0"/></visual>
  <worldbody>
    <camera name="above" pos="0.5 0.5 {_CAMERA_HEIGHT}" fovy="28.07"/>
    <geom type="box" pos="0.5 0.5 -0.02" size="0.5 0.5 0.02" rgba="0.36 0.31 0.27 1"/>
    <body name="gripper" pos="0 0 0.1">
      <joint name="right" type="slide" axis="1 0 0" damping="90"/>
      <joint name="up" type="slide" axis="0 1 0" damping="90"/>
      <geom type="cylinder" size="{GRIPPER_RADIUS} 0.05" mass="1" rgba="0.96 0.96 0.96 1"/>
    </body>
    {
    "".join(
        f'<body name="block{i}" mocap="true" pos="0 0 0.025"><geom type="cylinder" size="{BLOCK_RADIUS} 0.025"/></body>'
        for i in range(NUM_BLOCKS)
    )
}
  </worldbody>
  <actuator>
    <position joint="right" kp="2000" ctrlrange="{GRIPPER_RADIUS} {1 - GRIPPER_RADIUS}" ctrllimited="true"/>
    <position joint="up" kp="2000" ctrlrange="{GRIPPER_RADIUS} {1 - GRIPPER_RADIUS}" ctrllimited="true"/>
  </actuator>
</mujoco>
"""


class TableReachMujoco(TableReach):
    """The task "reach the red block" with a gripper on two slides, each driven by a position servo."""

    def __init__(
        self,
        size: int = 48,
        depth: bool = False,
        render_mode: str | None = None,
        camera: Literal["drawn", "mujoco"] = "drawn",
    ) -> None:
        """`camera`: images `drawn` by NumPy or rendered by `mujoco`; height maps are always drawn."""
        super().__init__(size, depth, render_mode)
        if camera not in ("drawn", "mujoco"):
            raise ConfigError("env.kwargs.camera", camera, "there is no such camera", "Use 'drawn' or 'mujoco'")
        self._model = mujoco.MjModel.from_xml_string(_XML)
        self._data = mujoco.MjData(self._model)
        self._renderer: Any = _make_renderer(self._model, size) if camera == "mujoco" else None

    def close(self) -> None:
        """Release the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _reset_physics(self) -> None:
        # A full reset, because the solver would otherwise warm-start from the last episode.
        mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[:] = self._data.ctrl[:] = self.gripper
        for i, (colour, position) in enumerate(zip(self.colours, self.blocks, strict=True)):
            self._data.mocap_pos[i, :2] = position
            geom = self._model.body(f"block{i}").geomadr[0]
            self._model.geom_rgba[geom, :3] = np.divide(RGB[colour], 255.0)
        mujoco.mj_forward(self._model, self._data)

    def _move(self, right: float, up: float) -> None:
        self._data.ctrl[:] = self.gripper[0] + right, self.gripper[1] + up
        mujoco.mj_step(self._model, self._data, _SUBSTEPS)
        self.gripper = clip_to_table(float(self._data.qpos[0]), float(self._data.qpos[1]), GRIPPER_RADIUS)

    def _draw(self) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
        rgb, depth = super()._draw()
        if self._renderer is not None:
            self._renderer.update_scene(self._data, camera="above")
            rgb = self._renderer.render().copy()
        return rgb, depth


def _make_renderer(model: Any, size: int) -> Any:
    try:
        return mujoco.Renderer(model, size, size)
    # Each OpenGL backend of MuJoCo raises another error if it is missing.
    except (ImportError, AttributeError, RuntimeError, mujoco.FatalError) as error:
        reason = f"MuJoCo found no OpenGL ({type(error).__name__})"
        remedy = "Set MUJOCO_GL=egl or osmesa before Python starts, or use 'drawn'"
        raise ConfigError("env.kwargs.camera", "mujoco", reason, remedy) from error
