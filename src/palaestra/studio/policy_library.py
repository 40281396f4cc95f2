"""Using trained policies from the window: cards, integrity, import, and letting one act in the play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palaestra.runs.checkpoints.deploy import Deployment
from palaestra.runs.client.client import TrainerService
from palaestra.runs.play.protocol import LoadPolicy
from palaestra.runs.play.state import PlayState, Report
from palaestra.runs.record import CheckpointRecord, CheckpointVerification
from palaestra.runs.series import MetricPoint
from palaestra.studio.model.checkpoints import CheckpointsModel
from palaestra.studio.play_session import PlaySession
from palaestra.studio.request import Requests

_SPARK_POINTS = 60
_RETURN_METRICS = ("episode_return", "episode/return")


class PolicyLibrary:
    """`Use trained`."""

    def __init__(self, requests: Requests, session: PlaySession) -> None:
        self._requests, self._session = requests, session
        self.checkpoints = CheckpointsModel()

    def refresh(self) -> None:
        """Read the list of checkpoints."""

        def receive(answer: tuple[Sequence[CheckpointRecord], Sequence[Deployment]]) -> None:
            self.checkpoints.set_all(*answer)

        self._requests.ask(
            "The checkpoints cannot be listed",
            lambda service: (service.checkpoints(), service.deployments()),
            receive,
            key="checkpoints",
        )

    def choose(self, checkpoint_id: str) -> None:
        """Show a checkpoint."""
        self.checkpoints.choose(checkpoint_id)
        record = self.checkpoints.get(checkpoint_id)
        if record is not None:
            self.read_curve(record.run_id)

    def read_curve(self, run_id: str) -> None:
        """Read the returns of a run for its sparkline, once."""
        if not run_id or run_id in self.checkpoints.curves:
            return
        self.checkpoints.set_curve(run_id, ())

        def receive(series: Mapping[str, Sequence[MetricPoint]]) -> None:
            points = next((series[name] for name in _RETURN_METRICS if series.get(name)), ())
            self.checkpoints.set_curve(run_id, [point.value for point in points])

        def read(service: TrainerService) -> Mapping[str, Sequence[MetricPoint]]:
            names = service.metric_names(run_id)
            chosen = [name for name in _RETURN_METRICS if name in names][:1]
            return service.metric_series(run_id, chosen, points=_SPARK_POINTS) if chosen else {}

        self._requests.ask("The curve cannot be read", read, receive, failed=lambda error: None)

    def activate(self, checkpoint_id: str, *, consent: str = "") -> None:
        """Let a policy act: load it into the play, or start a play with it."""
        if self._session.mode == "human":
            self._session.set_mode("agent")
        if self._session.play.is_open:
            self._session.send(LoadPolicy(checkpoint_id, consent=consent))
        else:
            self._session.start(checkpoint=checkpoint_id, consent=consent)

    def switch_environment(self, checkpoint_id: str) -> None:
        """Choose the environment that a policy was trained in, and let it act there."""
        record = self.checkpoints.get(checkpoint_id)
        if record is None or not record.env_id:
            return
        self._session.choose_environment(record.env_id.removeprefix("compiled/"))
        if self._session.mode == "human":
            self._session.set_mode("agent")
        self._session.start(checkpoint=checkpoint_id)

    def verify(self, checkpoint_id: str) -> None:
        """Compare every byte of a checkpoint with its hash."""

        def receive(verification: CheckpointVerification) -> None:
            self.checkpoints.update(verification.checkpoint)
            if verification.fits:
                self._requests.notices.add("success", f"{checkpoint_id} is intact.")
            else:
                self._requests.notices.add("error", f"{checkpoint_id} is damaged: {verification.problem}.")

        self._requests.ask(
            "The checkpoint cannot be verified", lambda service: service.verify_checkpoint(checkpoint_id), receive
        )

    def import_file(self, path: str, *, agent_id: str = "", env_id: str = "") -> None:
        """Copy a checkpoint from a file on the machine of the service."""

        def receive(record: CheckpointRecord) -> None:
            self.checkpoints.update(record)
            self.checkpoints.choose(record.checkpoint_id)
            self._requests.notices.add("success", f"{record.checkpoint_id} was imported.")

        self._requests.ask(
            "The file was not imported",
            lambda service: service.import_checkpoint(path, agent_id=agent_id, env_id=env_id),
            receive,
        )

    def deploy(self, checkpoint_id: str) -> None:
        """Make a checkpoint the one that acts in its environment."""
        self._requests.notices.add("info", "Playing one episode before the deployment …", key="deploy")
        self._requests.ask(
            "The checkpoint was not deployed",
            lambda service: service.deploy(checkpoint_id),
            lambda _: self.refresh(),
            key=f"deploy {checkpoint_id}",
        )

    def receive(self, play_id: str, report: Report) -> None:
        """Follow what the play reports about the policy that is being loaded."""
        if isinstance(report, PlayState) and play_id == self._session.play.play_id:
            self.checkpoints.set_policies(report.loading, report.policy)
