"""What passes of a model would take on a machine that is not here, predicted from bytes and rates. Simulates
nothing.

A pass reads its weights at 0.8 of the memory's bandwidth and takes 40 us a layer besides (norms, attention,
starting kernels): fitted to the passes measured on an H200 (docs/log.md), which it meets within 15 %. Reading
the KV cache is left out.
"""

from __future__ import annotations

from localmoe.core.types import ModelFootprint
from localmoe.hardware.limits import Rates
from localmoe.hardware.ram_experts import ram_bytes
from localmoe.prefetch.simulator_types import Disk, Lane, Machine

_READ_SHARE = 0.8
_LAYER_S = 40e-6
# Where experts are in codes, unpacking and multiplying take turns: a layer's take so much longer than reading
# them, whatever their number, for each 64 columns that are summed up (1 to 64 tokens of two shapes on H100s)
_TURN_S, _TURN_COLUMNS = 0.4e-6, 64
_STEP_S = 0.13e-3  # the host, between steps
# Of a CPU that computes experts, measured beside H100s (docs/log.md): handing a job over, and what each
# further token of an expert costs, as a share of the first, in 16 bits, and in codes
_HANDOVER_S = 30e-6
# Until an idle disk gives anything, and the threads have it: by which answers on an H200 were slower than
# their bytes (docs/log.md)
_DISK_START_S = 1.5e-3
_CPU_LAYER_S = 0.3e-3  # a layer of a model that the CPU runs alone, beside reading weights (docs/log.md)
_FURTHER = {"fp8": 0.27, "mxfp4": 0.33, "nvfp4": 0.35, "int4": 0.35, "int4-32": 0.35}
_FURTHER_FLOATS = 0.1


def predict_machine(
    footprint: ModelFootprint,
    num_slots: int,
    rates: Rates,
    *,
    compute_bytes: int = 2,
    whole_passes: bool = True,
    cpu_bytes_per_s: float | None = None,
    disk: Disk | None = None,
) -> Machine:
    """A machine for the simulator.

    Args:
        rates: of device memory and of the link to it.
        compute_bytes: bytes a weight on the device.
        whole_passes: as a GPU does it; else layer by layer.
        cpu_bytes_per_s: of experts' weights that the CPU computes with; None: it does not.
        disk: where experts lie that come to the CPU, in whole passes; None: all lie in RAM.
    """
    layers, read_rate = footprint.num_layers, rates.device_bytes_per_s * _READ_SHARE
    embedding = footprint.embedding_params * compute_bytes  # of which one row is read
    packed_away = footprint.packed_away_bytes if whole_passes else 0
    shared_s = (footprint.shared_bytes - embedding - packed_away) / read_rate
    draft_experts = layers * footprint.experts_per_token * footprint.draft_expert_bytes
    columns = footprint.hidden_size + footprint.inner_size
    turns = columns / _TURN_COLUMNS if footprint.keeps_codes else 0.0
    lane = None
    if cpu_bytes_per_s is not None:
        first_s = footprint.expert_bytes / cpu_bytes_per_s
        further = _FURTHER.get(footprint.expert_form, _FURTHER_FLOATS)
        lane = Lane(first_s, further * first_s, _HANDOVER_S)
    assert disk is None or (lane is not None and whole_passes), "see predict_in_place"
    return Machine(
        num_layers=layers,
        num_experts=footprint.num_experts,
        experts_per_token=footprint.experts_per_token,
        num_slots=min(num_slots, footprint.total_experts),
        expert_bytes=footprint.expert_bytes,
        copy_s=footprint.expert_bytes / rates.link_bytes_per_s,
        draft_token_s=shared_s + draft_experts / read_rate + layers * _LAYER_S,
        layer_s=shared_s / layers + _LAYER_S + turns * _TURN_S,
        expert_s=footprint.slot_bytes(compute_bytes) / read_rate,
        step_s=_STEP_S,
        whole_passes=whole_passes,
        lane=lane,
        disk=disk,
    )


def predict_in_place(footprint: ModelFootprint, cpu_bytes_per_s: float, disk: Disk) -> Machine:
    """A machine without a GPU, whose CPU computes with all weights where they lie.

    Args:
        cpu_bytes_per_s: of weights, in the threads that there are.
    """
    layers = footprint.num_layers
    embedding = footprint.embedding_params * 2  # of which one row is read
    shared_s = (footprint.shared_bytes - embedding) / cpu_bytes_per_s
    draft_experts = layers * footprint.experts_per_token * footprint.draft_expert_bytes
    return Machine(
        num_layers=layers,
        num_experts=footprint.num_experts,
        experts_per_token=footprint.experts_per_token,
        num_slots=footprint.total_experts,
        expert_bytes=footprint.expert_bytes,
        copy_s=0.0,
        draft_token_s=shared_s + draft_experts / cpu_bytes_per_s + layers * _CPU_LAYER_S,
        layer_s=shared_s / layers + _CPU_LAYER_S,
        expert_s=footprint.expert_bytes / cpu_bytes_per_s,
        whole_passes=False,
        disk=disk,
    )


def predict_disk(footprint: ModelFootprint, ram_experts: int, bytes_per_s: float) -> Disk:
    """A disk that gives so much, and RAM for so many experts."""
    read_bytes = ram_bytes(footprint, 1)
    return Disk(
        min(ram_experts, footprint.total_experts), read_bytes, read_bytes / bytes_per_s, _DISK_START_S
    )
