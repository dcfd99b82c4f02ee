"""Operations between the stages of a step: weights to generation, and the pause for staging."""

from __future__ import annotations

import numpy as np

from nereus.cluster import Cluster
from nereus.cost.operations import Operations
from nereus.cost.rates import Rates
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.spec import ModelSpec, num_parameters
from nereus.plan import StagePlan


def weight_sync_operations(
    spec: ModelSpec, training: StagePlan, generation: StagePlan, cluster: Cluster, rates: Rates
) -> Operations:
    """Return the operations of bringing the actor's new weights to its generation replicas.

    Nothing travels where every rank of generation lies on the same rank of training. Else each device of generation
    receives its shard in messages of bounded size; the devices of training send in equal parts; between nodes, all
    that a node sends or receives goes through its network. The slowest of the three decides.
    """
    if training.layout == generation.layout and set(generation.replicas) <= set(training.replicas):
        return Operations()
    whole = num_parameters(spec) * rates.element_bytes
    received = whole / generation.layout.size
    total = whole * generation.dp
    sent = total / len(training.devices)
    per_device = max(received, sent)
    work = per_device * rates.intra_byte_s
    sources = {cluster.node_of(device) for device in training.devices}
    targets = {cluster.node_of(device) for device in generation.devices}
    holders = _nodes_with_whole_copy(training, cluster)
    if not targets <= holders:
        per_node = max(total / len(targets), total / len(sources))
        work = max(work, per_node * rates.inter_byte_s)
    messages = np.ceil(per_device / SYNC_BUCKET_BYTES)
    return Operations(count={"weight_sync": messages}, work_s={"weight_sync": np.asarray(work)})


def _nodes_with_whole_copy(stage: StagePlan, cluster: Cluster) -> set[int]:
    """Return the nodes that hold at least one whole replica."""
    nodes = [{cluster.node_of(device) for device in replica} for replica in stage.replicas]
    return {min(group) for group in nodes if len(group) == 1}


def staging_operations(
    specs: dict[str, ModelSpec], devices: tuple[int, ...], cluster: Cluster, rates: Rates
) -> Operations:
    """Return the operations of writing the staged state of a step: master weights and both moments, each once.

    The bytes are balanced over all ranks and replicas, so every node of the trained model-stages writes an equal part.
    """
    state = sum(num_parameters(spec) for spec in specs.values()) * 3.0 * rates.master_bytes
    nodes = len({cluster.node_of(device) for device in devices})
    link = cluster.kind.storage
    work = state / nodes / link.bandwidth_bytes_s
    return Operations(count={"storage_write": np.asarray(1.0)}, work_s={"storage_write": np.asarray(work)})
