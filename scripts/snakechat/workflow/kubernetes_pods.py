"""Pods on Kubernetes: the restricted Pod Security Standard, and what Snakemake's plugin leaves out.

https://kubernetes.io/docs/concepts/security/pod-security-standards. The plugin has no setting for
the security context of its pods: they get it on their way to the API.

Standard library only, apart from the client of Kubernetes: the workflow imports this module while
it plans.
"""

from typing import Any

# The user of the image (envs/Dockerfile). Kubernetes gives the volume to its group, where the type
# of the volume allows it.
USER = 1000
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def restrict_pods(workflow: Any) -> None:
    """Have the pods of a build on Kubernetes run restricted and without a token of the API.

    The plugin also asks for the log of a previous container of a failed pod. There is none, and the
    error would end the build instead of starting a retry: it gets the log of the only container.
    """
    if workflow.executor_plugin.name != "kubernetes":
        return
    from kubernetes.client import BatchV1Api, CoreV1Api

    create_job, read_log = BatchV1Api.create_namespaced_job, CoreV1Api.read_namespaced_pod_log

    def create_restricted_job(api: Any, namespace: str, body: Any, **options: Any) -> Any:
        pod = body.spec.template.spec
        pod.automount_service_account_token = False
        pod.security_context = POD_SECURITY
        for container in pod.containers:
            # A user may have asked for privileged containers (kubernetes-privileged).
            container.security_context = container.security_context or CONTAINER_SECURITY
        return create_job(api, namespace, body, **options)

    def read_only_log(api: Any, *arguments: Any, **options: Any) -> Any:
        return read_log(api, *arguments, **{**options, "previous": False})

    BatchV1Api.create_namespaced_job = create_restricted_job
    CoreV1Api.read_namespaced_pod_log = read_only_log
