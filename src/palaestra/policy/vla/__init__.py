"""Pretrained vision-language-action models as policies."""

from palaestra.policy.vla.conformance import check_vla_model
from palaestra.policy.vla.loading import load_vla_model
from palaestra.policy.vla.policy import VLAModelInterface, VLAPolicy

__all__ = ["VLAModelInterface", "VLAPolicy", "check_vla_model", "load_vla_model"]
