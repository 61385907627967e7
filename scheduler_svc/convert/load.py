"""Converts the load of a deployment to the message that clients receive."""

from protos.triptych.v1 import inference_pb2
from scheduler_svc.dispatch.load import Load, ReplicaLoad


def load_to_proto(load: Load) -> inference_pb2.Load:
    """Converts the load of a deployment."""
    return inference_pb2.Load(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_waiting_tokens=load.num_waiting_tokens,
        kv_usage=load.kv_usage,
        replicas=[_replica_to_proto(replica) for replica in load.replicas],
    )


def _replica_to_proto(replica: ReplicaLoad) -> inference_pb2.ReplicaLoad:
    if replica.starting is not None:
        return inference_pb2.ReplicaLoad(
            replica_id=replica.replica_id,
            state=inference_pb2.REPLICA_STATE_CONFIGURING,
            detail=replica.starting,
        )
    return inference_pb2.ReplicaLoad(
        replica_id=replica.replica_id,
        state=inference_pb2.REPLICA_STATE_READY,
        num_running=replica.num_running,
        kv_usage=replica.kv_usage,
    )
