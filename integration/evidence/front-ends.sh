# shellcheck shell=bash disable=SC2034,SC2154  # read by checks, whose functions and variables it uses
# The parts of checks about the commands that people type: podman, docker and nerdctl.
#
# Each is taken through the same: a counter answers 101; a checkpoint leaves it running, 102; two
# more end it, and it is restored, 103 and 104. What the tool's own `logs` shows is then 101 to 104,
# each once.

# The present one, with what it needs to find its daemon and its store; and its flags for the GPU.
client=() client_gpu=()
# How a container of it has a counter to itself.
client_network=(--network none)

client_pid() { "${client[@]}" inspect --format '{{.State.Pid}}' "$1" 2>/dev/null; }

# client_is ID STATUS: within the time that a killed process with work in flight may take.
client_is() {
    local i is
    for ((i = 0; i < 100; i++)); do
        is=$("${client[@]}" inspect --format '{{.State.Status}}' "$1" 2>/dev/null)
        [ "$is" != "$2" ] || break
        sleep 0.1
    done
    if [ "$is" = "$2" ]; then pass "$1 is $2"; else fail "$1 is '$is' and not $2"; fi
}

# client_answers ID NUMBER
client_answers() { answers "$1" "$2" "$(client_pid "$1")"; }

# has_logged ID LAST: 101 to LAST, each once.
has_logged() {
    local i log
    for ((i = 0; i < 50; i++)); do
        log=$("${client[@]}" logs "$1" 2>&1 | paste -sd ' ')
        [ "$log" != "$(seq -s ' ' 101 "$2")" ] || break
        sleep 0.1
    done
    if [ "$log" = "$(seq -s ' ' 101 "$2")" ]; then
        pass "$(basename "${client[0]}") logs $1 shows $log"
    else
        fail "$(basename "${client[0]}") logs $1 shows '$log' and not 101 to $2"
    fi
}

# client_counter ID FLAG...: starts one, with the GPU.
client_counter() {
    local id=$1 i
    shift
    run "${client[@]}" run --detach --name "$id" "${client_network[@]}" "${client_gpu[@]}" "$@" \
        "$image" /bin/counter --stdout --ready /data/ready --pattern-mib "$pattern"
    succeeds "$(basename "${client[0]}") run of $id"
    [ "$status" -eq 0 ] || return
    wait_for_file "/proc/$(client_pid "$id")/root/data/ready" && return
    fail "$id is ready in time, it said: $("${client[@]}" logs "$id" 2>&1)"
    return 1
}

# The GPU by its nodes and libraries, in Docker's flags.
gpu_by_path() {
    local path
    client_gpu=()
    for path in "${gpu_devices[@]}"; do
        client_gpu+=(--device "$path")
    done
    for path in "${gpu_libraries[@]}"; do
        client_gpu+=(--volume "$path:$path:ro")
    done
    for path in "${gpu_directories[@]}"; do
        client_gpu+=(--volume "$path:$path")
    done
}

# The GPU by this host's CDI specification.
gpu_by_cdi() {
    write_specification
    client_gpu=(--device nvidia.com/gpu=0)
}

# shows_gpu ID: to nvidia-smi in a container whose GPU came by CDI, which has that.
shows_gpu() {
    [ -z "$emulated" ] || return 0
    run "${client[@]}" exec "$1" nvidia-smi --query-gpu=name,memory.used --format=csv
    succeeds "nvidia-smi in the restored $1"
}

client_remove() {
    run "${client[@]}" kill "$1"
    run "${client[@]}" rm --force "$1"
    succeeds "rm of $1"
    nothing_of_gpu "$1"
}

# nothing_of_gpu ID: once it has ended.
nothing_of_gpu() {
    local i apps=''
    [ -z "$emulated" ] || return 0
    for ((i = 0; i < 100; i++)); do
        apps=$(nvidia-smi --query-compute-apps=pid,name --format=csv,noheader)
        [ -n "$apps" ] || break
        sleep 0.1
    done
    if [ -z "$apps" ]; then pass "$1 holds nothing of the card"; else fail "on the card still: $apps"; fi
}

# --- Podman ---

podman_image() {
    image_archive /tmp/image.tar
    run "${client[@]}" load --quiet --input /tmp/image.tar
    succeeds "podman load"
    rm -f /tmp/image.tar
}

part_podman() {
    part "podman: Podman and conmon, with stasis-runc as the runtime"
    local driver=overlay exported=/var/exported.tar.zst
    # Overlay on overlay does not go.
    [ "$(stat -f -c %T /var)" != overlayfs ] || driver=vfs
    mkdir -p /etc/containers /var/tmp
    printf '[storage]\ndriver = "%s"\ngraphroot = "/var/lib/podman"\nrunroot = "/run/podman"\n' \
        "$driver" >/etc/containers/storage.conf
    cat >/etc/containers/containers.conf <<END
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "stasis-runc"
[engine.runtimes]
stasis-runc = ["/opt/stasis/stasis-runc"]
END
    export PODMAN_IGNORE_CGROUPSV1_WARNING=1
    client=(podman)
    local client_cgroup=(--cgroup-parent /stasis-evidence-podman)
    # A kernel without this controller has no file for the limit that Podman sets.
    if [ -e /sys/fs/cgroup/cgroup.controllers ] && ! grep -qw pids /sys/fs/cgroup/cgroup.controllers; then
        client_cgroup+=(--pids-limit 0)
    fi
    gpu_by_path
    client_gpu+=("${client_cgroup[@]}")
    run podman version
    run conmon --version
    podman_image
    [ "$status" -eq 0 ] || return

    client_counter pod1 || return
    client_answers pod1 101
    gpu_memory "with pod1"
    run podman container checkpoint --leave-running pod1
    succeeds "podman container checkpoint --leave-running"
    fact "podman container checkpoint --leave-running: $took"
    client_is pod1 running
    client_answers pod1 102
    has_logged pod1 102
    local cycle
    for cycle in 1 2; do
        run podman container checkpoint pod1
        succeeds "podman container checkpoint, cycle $cycle"
        fact "podman container checkpoint: $took"
        client_is pod1 exited
        nothing_of_gpu pod1
        run podman container restore pod1
        succeeds "podman container restore, cycle $cycle"
        fact "podman container restore: $took"
        client_is pod1 running
        client_answers pod1 $((102 + cycle))
        has_logged pod1 $((102 + cycle))
    done
    run podman exec pod1 cat /proc/1/comm
    succeeds "podman exec in the restored pod1"

    part "podman: --export, and --import into a fresh store"
    run podman container checkpoint --export "$exported" pod1
    succeeds "podman container checkpoint --export"
    fact "podman container checkpoint --export: $took; $(du -sm "$exported" | cut -f1) MiB"
    client_is pod1 exited
    nothing_of_gpu pod1
    run podman rm pod1
    succeeds "podman rm"
    # What is exported names the paths of its store.
    run podman system reset --force
    podman_image
    run podman container restore --import "$exported"
    succeeds "podman container restore --import"
    fact "podman container restore --import: $took"
    client_is pod1 running
    client_answers pod1 105
    run podman container checkpoint pod1
    succeeds "podman container checkpoint of the imported"
    run podman container restore pod1
    succeeds "podman container restore of the imported"
    client_answers pod1 106
    # The log travels in the export.
    has_logged pod1 106
    client_remove pod1
    rm -f "$exported"

    part "podman: --device nvidia.com/gpu=0"
    gpu_by_cdi
    client_gpu+=("${client_cgroup[@]}")
    client_counter pod2 || return
    client_answers pod2 101
    for cycle in 1 2; do
        run podman container checkpoint pod2
        succeeds "podman container checkpoint, cycle $cycle"
        run podman container restore pod2
        succeeds "podman container restore, cycle $cycle"
        client_answers pod2 $((101 + cycle))
        shows_gpu pod2
    done
    has_logged pod2 103
    client_remove pod2
}

# --- Docker and nerdctl ---

# checkpoint_and_start ID NAME ENDS: one that ends the container, by itself or, if ENDS is empty, by
# another command; then the container from there.
checkpoint_and_start() {
    run "${client[@]}" checkpoint create "$1" "$2"
    succeeds "checkpoint create of $1"
    fact "${client[0]} checkpoint create: $took"
    if [ -z "$3" ]; then
        client_is "$1" running
        run "${client[@]}" kill "$1"
    fi
    client_is "$1" exited
    nothing_of_gpu "$1"
    run "${client[@]}" start --checkpoint "$2" "$1"
    succeeds "start --checkpoint of $1"
    fact "${client[0]} start --checkpoint: $took"
    client_is "$1" running
}

# two_cycles ID ENDS FLAG...
two_cycles() {
    local id=$1 ends=$2
    shift 2
    client_counter "$id" "$@" || return
    client_answers "$id" 101
    gpu_memory "with $id"
    # The names are the container's own: nerdctl keeps the checkpoints of all in one directory.
    run "${client[@]}" checkpoint create --leave-running "$id" "$id-kept"
    succeeds "checkpoint create --leave-running of $id"
    fact "${client[0]} checkpoint create --leave-running: $took"
    client_is "$id" running
    client_answers "$id" 102
    has_logged "$id" 102
    local cycle
    for cycle in 1 2; do
        checkpoint_and_start "$id" "$id-$cycle" "$ends"
        client_answers "$id" $((102 + cycle))
        has_logged "$id" $((102 + cycle))
    done
    run "${client[@]}" exec "$id" cat /proc/1/comm
    succeeds "exec in the restored $id"
    [[ " ${client_gpu[*]} " != *' nvidia.com/'* ]] || shows_gpu "$id"
    client_remove "$id"
}

# use_docker NAME [DIRECTORY]: a dockerd on a containerd that looks for shims in DIRECTORY first.
use_docker() {
    local name=$1 i
    start_containerd "$name-containerd" debug "${2-}" || return
    client=(docker --host "unix:///run/$name.sock")
    mkdir -p "/logs/$name"
    cat >"/etc/$name.json" <<END
{"experimental": true, "containerd": "$socket", "hosts": ["unix:///run/$name.sock"],
 "data-root": "/var/lib/$name", "exec-root": "/run/$name", "pidfile": "/run/$name.pid",
 "bridge": "none", "iptables": false, "ip6tables": false, "userland-proxy": false, "features": {"cdi": true},
 "cgroup-parent": "/stasis-evidence-$name", "exec-opts": ["native.cgroupdriver=cgroupfs"],
 "runtimes": {"stasis-runc": {"path": "/opt/stasis/stasis-runc"},
              "stasis": {"runtimeType": "io.containerd.runc.stasis"}}}
END
    dockerd --config-file "/etc/$name.json" >"/logs/$name/log" 2>&1 </dev/null &
    for ((i = 0; i < 300; i++)); do
        ! "${client[@]}" version >/dev/null 2>&1 || break
        sleep 0.1
    done
    run "${client[@]}" version --format '{{.Client.Version}} and {{.Server.Version}}'
    succeeds "dockerd starts"
    if [ "$status" -ne 0 ]; then
        tail -n 5 "/logs/$name/log"
        return 1
    fi
    # From 28 on Docker wants the pid of a container before a restore has made it, where the
    # container has a network namespace of its own: containerd#12141.
    client_network=(--network none)
    [ "${output%%.*}" -lt 28 ] || client_network=(--network host)
    image_archive /tmp/image.tar
    run "${client[@]}" load --input /tmp/image.tar
    succeeds "docker load"
    rm -f /tmp/image.tar
}

part_docker() {
    part "docker: runtimes.NAME.path = stasis-runc, with Go's shim"
    use_docker docker || return
    gpu_by_path
    two_cycles dock1 ends --runtime stasis-runc

    part "docker: runtimes.NAME.runtimeType = io.containerd.runc.stasis, our shim"
    engine_log=/logs/docker-containerd/log
    # Docker asks for an end with the checkpoint of the runtimes only that are runc's.
    two_cycles dock2 '' --runtime stasis

    part "docker: our shim as containerd-shim-runc-v2, first in containerd's PATH; --device nvidia.com/gpu=0"
    use_docker docker-replaced /opt/stasis-replaces || return
    engine_log=/logs/docker-replaced-containerd/log
    gpu_by_cdi
    two_cycles dock3 ends
}

# use_nerdctl NAME LEVEL [DIRECTORY]: as use_containerd.
use_nerdctl() {
    use_containerd "$@" || return
    engine_log=/logs/$1/log
    client=(nerdctl --address "$socket" --namespace stasis-evidence --cgroup-manager cgroupfs
        --data-root /var/lib/nerdctl)
    [ "${CONTAINERD_SNAPSHOTTER-overlayfs}" = overlayfs ] || client+=(--snapshotter "$CONTAINERD_SNAPSHOTTER")
    client_network=(--network none)
    gpu_by_path
}

part_nerdctl() {
    part "nerdctl: our shim under its own name"
    use_nerdctl own debug || return
    run "${client[@]}" --version
    # nerdctl asks for an end with the checkpoint only of what is called io.containerd.runc.v2.
    two_cycles nerd1 '' --runtime io.containerd.runc.stasis

    part "nerdctl: our shim as containerd-shim-runc-v2, first in containerd's PATH; --device nvidia.com/gpu=0"
    use_nerdctl replaced debug /opt/stasis-replaces || return
    gpu_by_cdi
    two_cycles nerd2 ends

    part "nerdctl: --runtime /opt/stasis/stasis-runc, with Go's shim"
    use_nerdctl containerd info || return
    engine_log=$stasis_log
    two_cycles nerd3 ends --runtime /opt/stasis/stasis-runc
}
