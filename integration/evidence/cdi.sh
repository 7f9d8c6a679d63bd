# shellcheck shell=bash disable=SC2034,SC2154  # read by checks, whose functions and variables it uses
# The part of checks about GPUs that come by this host's CDI specification, which it writes.

# What it mounts besides directories.
cdi_files=("${gpu_libraries[@]}")
[ -z "$(command -v nvidia-smi)" ] || cdi_files+=(/usr/bin/nvidia-smi)

# listed FORM PATH...: the form for each of the paths, which it calls PATH; commas between them.
listed() {
    local form=$1 path list=''
    shift
    for path in "$@"; do
        list+=,${form//PATH/$path}
    done
    printf '%s' "${list#,}"
}

# What nvidia-ctk would say of this host, without its hooks: all libraries are where the loader looks.
write_specification() {
    local own='' path common=() mounts
    for path in "${gpu_devices[@]}"; do
        if [[ $path =~ ^/dev/nvidia([0-9]+)$ ]]; then
            own+=",{\"name\":\"${BASH_REMATCH[1]}\",\"containerEdits\":{\"deviceNodes\":[{\"path\":\"$path\"}]}}"
        else
            common+=("$path")
        fi
    done
    mounts=$(listed '{"hostPath":"PATH","containerPath":"PATH","options":["ro","nosuid","nodev","rbind","rprivate"]}' \
        "${cdi_files[@]}")
    [ ${#gpu_directories[@]} -eq 0 ] || mounts+=,$(listed \
        '{"hostPath":"PATH","containerPath":"PATH","options":["rw","rbind"]}' "${gpu_directories[@]}")
    mkdir -p /etc/cdi
    cat >/etc/cdi/nvidia.json <<END
{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu",
"devices": [${own#,}],
"containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"],
    "deviceNodes": [$(listed '{"path":"PATH"}' "${common[@]}")],
    "mounts": [$mounts]}}
END
}

# gpu_works_in ID RUNTIME...: in a process that RUNTIME's exec starts in the container: NVML and CUDA.
gpu_works_in() {
    local id=$1 pid i
    shift
    if [ -z "$emulated" ]; then
        run "$@" exec "$id" nvidia-smi --query-gpu=name,memory.used --format=csv
        succeeds "nvidia-smi in $id"
    fi
    run "$@" exec --detach --pid-file /tmp/exec.pid "$id" \
        /bin/counter --port 10001 --ready /data/exec-ready --pattern-mib 8
    succeeds "exec of another counter in $id"
    pid=$(cat /tmp/exec.pid)
    if ! wait_for_file "$(data "$id")/exec-ready"; then
        fail "the other counter in $id is ready in time"
        return
    fi
    answers "the other counter in $id," 101 "$pid" 10001
    kill -KILL "$pid"
    # With work in flight it may take seconds to end, and is one more process until then.
    for ((i = 0; i < 100; i++)); do
        [ -d "/proc/$pid" ] || break
        sleep 0.1
    done
    rm -f "$(data "$id")/exec-ready"
}

# wrong_node ID PATH: with a number that it has nowhere, in the running container.
wrong_node() {
    local node
    node=/proc/$(pid "$1")/root$2
    rm "$node"
    mknod -m 0666 "$node" c 10 251
    fact "$2 in $1 is now $(stat -c '%t:%T' "$node")"
}

# right_node ID PATH
right_node() {
    local is here
    is=$(stat -c '%t:%T' "/proc/$(pid "$1")/root$2") here=$(stat -c '%t:%T' "$2")
    if [ "$is" = "$here" ]; then pass "$2 in $1 is this host's, $is"; else fail "$2 in $1 is $is and not $here"; fi
}

# fresh_config ID ANNOTATIONS: config.json without any GPU, as NVIDIA's runtime leaves it for a
# restore, of a bundle whose container is a counter.
fresh_config() {
    local gpu_libraries=() gpu_devices=() gpu_directories=()
    config_json "$1" "$2" counter --ready /data/ready --log /data/log --pattern-mib "$pattern"
}

# restored_with_gpu ID NUMBER: after a restore.
restored_with_gpu() {
    succeeds "restore of $1 from this host's CDI"
    [ "$status" -eq 0 ] || return
    fact "restore with CDI: $took"
    is "$1" running
    answers "$1" "$2"
    local path
    for path in "${gpu_devices[@]}"; do
        right_node "$1" "$path"
    done
    gpu_works_in "$1" stasis-runc
    # What the other counter had.
    gpu_memory "after that"
}

part_cdi() {
    local gpu_libraries=("${cdi_files[@]}") node
    write_specification
    # The one with another number after each boot; on the emulated GPU there is but one.
    node=/dev/nvidia-uvm
    [ -e "$node" ] || node=/dev/nvidia0

    part "cdi: restored into a bundle without a GPU, which an annotation asks for"
    run stasis check
    counter g1 --pattern-mib "$pattern"
    answers g1 101
    wrong_node g1 "$node"
    checkpoint g1 g1
    succeeds "checkpoint of g1"
    gone g1
    fresh_config g1 ''
    restore g1 g1
    refuses "restore without any GPU" "which the new container's config.json does not give"
    stasis-runc delete --force g1 >/dev/null 2>&1
    printf '[cdi]\nvisible-devices = true\n' >>/etc/stasis/config.toml
    fresh_config g1 '"cdi.k8s.io/stasis":"nvidia.com/gpu=0"'
    restore g1 g1
    restored_with_gpu g1 102 || return
    checkpoint g1 g1
    succeeds "second checkpoint of g1"
    gone g1
    fresh_config g1 '"cdi.k8s.io/stasis":"nvidia.com/gpu=0"'
    restore g1 g1
    restored_with_gpu g1 103 || return
    unbroken g1
    remove g1

    part "cdi: the same where NVIDIA_VISIBLE_DEVICES asks for it"
    local container_environment=(PATH=/bin NVIDIA_VISIBLE_DEVICES=0)
    counter g2 --pattern-mib "$pattern"
    answers g2 101
    checkpoint g2 g2
    succeeds "checkpoint of g2"
    gone g2
    fresh_config g2 ''
    restore g2 g2
    restored_with_gpu g2 102 || return
    remove g2

    case $(containerd --version 2>/dev/null) in
    *' 2.'*) ;;
    *) return ;;
    esac
    # What ctr knows from containerd 2.0 on.
    part "cdi: ctr run --device nvidia.com/gpu=0 with our shim"
    use_containerd own debug || return
    engine_log=/logs/own/log
    local gpu_flags=("${plain_flags[@]}" --device nvidia.com/gpu=0)
    run_counter g3 --runtime io.containerd.runc.stasis -- --pattern-mib "$pattern" || return
    answers g3 101
    run_ctr containers checkpoint --rw --task g3 checkpoint/g3:1
    succeeds "ctr containers checkpoint --rw --task"
    end_task g3
    run_ctr containers restore --rw --live g3 checkpoint/g3:1
    succeeds "ctr containers restore --rw --live"
    task_is g3 RUNNING
    answers g3 102
    if [ -z "$emulated" ]; then
        run_ctr tasks exec --exec-id smi g3 nvidia-smi --query-gpu=name,memory.used --format=csv
        succeeds "nvidia-smi in g3"
    fi
    end_task g3
    run_ctr images rm --sync checkpoint/g3:1
    rm -rf /tmp/ctrd-checkpoint*
}
