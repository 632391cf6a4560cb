"""The restricted Pod Security Standard of Kubernetes, as far as it concerns Linux.

Written from its list of controls, https://kubernetes.io/docs/concepts/security/pod-security-standards
(profiles Baseline and Restricted); the API server applies the same list to pods of a namespace with
the label pod-security.kubernetes.io/enforce: restricted.
"""

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
VOLUMES |= {"projected", "secret"}
SAFE_SYSCTLS = {"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range"}
SAFE_SYSCTLS |= {"net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies"}
SAFE_SYSCTLS |= {"net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"}
SAFE_SYSCTLS |= {f"net.ipv4.tcp_{name}" for name in ("keepalive_time", "fin_timeout")}
SAFE_SYSCTLS |= {f"net.ipv4.tcp_keepalive_{name}" for name in ("intvl", "probes")}
SAFE_SYSCTLS |= {f"net.ipv4.tcp_{name}" for name in ("rmem", "wmem")}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t"}
SELINUX_TYPES |= {"container_engine_t"}
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def _probe_hosts(container):
    lifecycle = container.get("lifecycle", {})
    handlers = [container.get(name, {}) for name in PROBES]
    handlers += [lifecycle.get(name, {}) for name in ("postStart", "preStop")]
    actions = (handler.get(kind, {}) for handler in handlers for kind in ("httpGet", "tcpSocket"))
    return any(action.get("host") for action in actions)


# Each control: whether a container violates it, given the pod, its security context, the container
# and its security context.
RESTRICTIONS = {
    "host namespaces": lambda pod, p, container, c: any(
        pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")
    ),
    "host ports": lambda pod, p, container, c: any(
        port.get("hostPort") for port in container.get("ports", ())
    ),
    "probe hosts": lambda pod, p, container, c: _probe_hosts(container),
    "HostProcess": lambda pod, p, container, c: any(
        context.get("windowsOptions", {}).get("hostProcess") for context in (p, c)
    ),
    "privileged": lambda pod, p, container, c: bool(c.get("privileged")),
    "capabilities": lambda pod, p, container, c: (
        "ALL" not in c.get("capabilities", {}).get("drop", ())
        or not {"NET_BIND_SERVICE"}.issuperset(c["capabilities"].get("add", ()))
    ),
    "volume types": lambda pod, p, container, c: any(
        not volume.keys() - {"name"} <= VOLUMES for volume in pod.get("volumes", ())
    ),
    "privilege escalation": lambda pod, p, container, c: (
        c.get("allowPrivilegeEscalation") is not False
    ),
    "root": lambda pod, p, container, c: c.get("runAsNonRoot", p.get("runAsNonRoot")) is not True,
    "root user": lambda pod, p, container, c: 0 in (p.get("runAsUser"), c.get("runAsUser")),
    "seccomp": lambda pod, p, container, c: (
        c.get("seccompProfile", p.get("seccompProfile", {})).get("type")
        not in ("RuntimeDefault", "Localhost")
    ),
    "AppArmor": lambda pod, p, container, c: any(
        context.get("appArmorProfile", {}).get("type") not in (None, "RuntimeDefault", "Localhost")
        for context in (p, c)
    ),
    "SELinux": lambda pod, p, container, c: any(
        options.get("type") not in SELINUX_TYPES or options.get("user") or options.get("role")
        for options in (context.get("seLinuxOptions", {}) for context in (p, c))
    ),
    "/proc": lambda pod, p, container, c: c.get("procMount") not in (None, "Default"),
    "sysctls": lambda pod, p, container, c: any(
        sysctl["name"] not in SAFE_SYSCTLS for sysctl in p.get("sysctls", ())
    ),
}


def restricted_problems(pod):
    """Return what the restricted standard forbids in the spec of a pod: CONTAINER: CONTROL."""
    kinds = ("initContainers", "containers", "ephemeralContainers")
    return [
        f"{container['name']}: {control}"
        for kind in kinds
        for container in pod.get(kind, ())
        for control, violates in RESTRICTIONS.items()
        if violates(
            pod, pod.get("securityContext") or {}, container, container.get("securityContext") or {}
        )
    ]
