# Suspend and resume without CRIU, and NVIDIA's command as the way to the driver: parts `suspend` and
# `utility` of checks.
#
# shellcheck shell=bash disable=SC2154  # what is not set here is set in checks

# says WHAT WORDS: the last command succeeded and said so.
says() {
    if [ "$status" -eq 0 ] && grep -qF -- "$2" <<<"$output"; then
        pass "$1: $2"
    else
        fail "$1: exit status $status, expected: $2"
    fi
}

# silent ID: a question has no answer. Its CUDA call waits; it comes with the next resume.
silent() {
    local answer
    answer=$(ask_briefly "$(pid "$1")" | grep -E '^[0-9]+$')
    if [ -z "$answer" ]; then pass "$1 waits"; else fail "$1 answers $answer"; fi
}

ask_briefly() {
    # shellcheck disable=SC2016  # the inner shell's variables
    nsenter --net="/proc/$1/ns/net" bash -c 'exec 3<>/dev/udp/127.0.0.1/10000; echo "" >&3
        timeout 1 dd bs=64 count=1 <&3 2>/dev/null' 2>&1
}

part_suspend() {
    local size room ballast='' rounds=3 pids
    part "suspend: the GPU of a container is freed, and it goes on where it was"
    counter s0 --pattern-mib "$pattern"
    answers s0 101
    run stasis ps
    says "ps" "running"
    for count in 102 103; do
        run stasis suspend s0
        says "suspend" "is suspended: 1 process"
        gpu_memory "while s0 is suspended"
        run stasis ps
        says "ps" "suspended"
        is s0 running
        run stasis resume s0
        says "resume" "is resumed: 1 process"
        answers s0 "$count"
    done
    run stasis suspend s0
    silent s0
    run stasis resume s0
    # The question that waited was answered, to nobody.
    answers s0 105
    run stasis suspend s0
    checkpoint s0 suspended
    succeeds "checkpoint of a suspended container"
    gone s0
    restore s0 suspended
    succeeds "its restore, which runs"
    answers s0 106
    remove s0

    part "suspend: two that both need more than half of the card take turns"
    if [ -n "$emulated" ]; then
        size=$((pattern + pattern / 4))
    else
        size=$(($(nvidia-smi --id=0 --query-gpu=memory.total --format=csv,noheader,nounits) / 2 + 1024))
        # Host memory for both is needed at the moment of a change. A virtual machine that gets its
        # memory as it uses it says too little of it.
        room=$(($(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024))
        [ "${STASIS_MEMORY_MIB:-0}" -lt "$room" ] || room=$STASIS_MEMORY_MIB
        fact "$size MiB each; this machine's memory: $room MiB"
        printf '[log]\nlevel = "debug"\n[cuda]\ncheck-host-memory = false\n' >/etc/stasis/config.toml
        rounds=1
    fi
    if [ -z "$emulated" ] && [ "$room" -lt $((size * 5 / 2)) ]; then
        # Then what there is is made small by a third, which stays.
        size=$((24 * pattern))
        room=$(nvidia-smi --id=0 --query-gpu=memory.free --format=csv,noheader,nounits)
        ballast=$((room - size * 3 / 2 - 2048))
        counter s9 --pattern-mib "$ballast"
        answers s9 101
    fi
    gpu_memory "before"
    counter s1 --pattern-mib "$size"
    answers s1 101
    run stasis suspend s1
    succeeds "suspend of s1 with $size MiB"
    counter s2 --pattern-mib "$size"
    answers s2 101
    run stasis resume s1 --timeout 2s
    refuses "no room" "nothing is lost"
    run stasis ps
    for count in $(seq 102 $((101 + rounds))); do
        run stasis suspend s2
        succeeds "suspend of s2"
        run stasis resume s1
        succeeds "resume of s1"
        gpu_memory "s1's turn"
        answers s1 "$count"
        run stasis suspend s1
        succeeds "suspend of s1"
        run stasis resume s2
        succeeds "resume of s2"
        answers s2 "$count"
    done
    run stasis suspend s2
    succeeds "suspend of s2"
    part "suspend: both are resumed at the same moment"
    pids=''
    for id in s1 s2; do
        stasis resume "$id" --timeout 5s >"/tmp/resume-$id" 2>&1 &
        pids+=" $!"
    done
    # shellcheck disable=SC2086  # two words
    for pid in $pids; do wait "$pid"; fact "a resume ended with status $?"; done
    for id in s1 s2; do sed "s/^/    /" "/tmp/resume-$id"; done
    output=$(cat /tmp/resume-s1 /tmp/resume-s2)
    status=0
    says "one of them" "is resumed: 1 process"
    says "the other one" "is suspended and nothing is lost"
    for id in s1 s2; do
        if grep -q "is resumed" "/tmp/resume-$id"; then
            answers "$id" $((102 + rounds))
        fi
        remove "$id"
    done
    [ -z "$ballast" ] || {
        answers s9 102
        remove s9
    }
    printf '[log]\nlevel = "debug"\n' >/etc/stasis/config.toml
}

# Before what is derived from them: which device files tell what, and how much host memory it takes.
part_facts() {
    local before limit=''
    part "facts: device files, and host memory of a suspended process"
    counter f1 --pattern-mib "$pattern"
    answers f1 101
    fact "a process with CUDA has open: $(devices_of "$(pid f1)")"
    before=$(anonymous "$(pid f1)")
    gpu_memory "f1"
    run stasis suspend f1
    succeeds "suspend"
    fact "suspended, it has open: $(devices_of "$(pid f1)")"
    fact "its anonymous memory: $before MiB running, $(anonymous "$(pid f1)") MiB suspended"
    run stasis resume f1
    fact "resumed: $(anonymous "$(pid f1)") MiB"
    answers f1 102
    [ -n "$emulated" ] || fact "a process with NVML has open: $(nvml_devices)"
    limit=$(cgroup_limit f1)
    if [ -n "$limit" ]; then
        # Enough for what is there, not for what is on the GPU.
        echo $(($(cat "${limit%max}current") + (pattern << 19))) >"$limit"
        run stasis suspend f1
        refuses "no room in host memory" "check-host-memory"
        answers f1 103
        echo max >"$limit"
    fi
    remove f1
}

devices_of() {
    # shellcheck disable=SC2012  # names of the kernel's, one a line
    ls -l "/proc/$1/fd" | sed -n 's|.*-> \(/dev/nvidia.*\)|\1|p' | sort | uniq -c | tr -s ' \n' ' '
}

anonymous() {
    echo $(($(sed -n 's/^RssAnon:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$1/status") / 1024))
}

# nvidia-smi uses NVML and no CUDA.
nvml_devices() {
    nvidia-smi --loop=60 >/dev/null 2>&1 &
    sleep 1
    devices_of $!
    kill $!
}

# cgroup_limit ID: the file with the limit of its memory, in version 2 of cgroups.
cgroup_limit() {
    local file
    file=/sys/fs/cgroup$(sed -n 's/^0:://p' "/proc/$(pid "$1")/cgroup")/memory.max
    [ ! -f "$file" ] || echo "$file"
}

# What NVIDIA's command says where there is no room, and whether that is final.
part_toggle() {
    local utility size
    part "toggle: NVIDIA's command by hand, without room for what it restores"
    utility=$(command -v cuda-checkpoint) || {
        fact "there is no cuda-checkpoint on this machine: nothing is tried"
        return
    }
    [ -z "$emulated" ] || {
        fact "of the emulation nothing is learnt"
        return
    }
    size=$((8 * pattern))
    counter t1 --pattern-mib "$size"
    answers t1 101
    by_hand t1
    size=$(($(nvidia-smi --id=0 --query-gpu=memory.free --format=csv,noheader,nounits) - size / 2))
    counter t2 --pattern-mib "$size"
    answers t2 101
    by_hand t1
    by_hand t1
    remove t2
    by_hand t1
    fact "t1 answers: $(ask_briefly "$(pid t1)")"
    remove t1
}

# by_hand ID: toggles it, and tells what came of it.
by_hand() {
    local said status
    said=$("$utility" --toggle --pid "$(pid "$1")" 2>&1)
    status=$?
    fact "--toggle of $1: status $status: $said; then $("$utility" --get-state --pid "$(pid "$1")" 2>&1)"
}

# free_mib: what is free on the first GPU.
free_mib() { nvidia-smi --id=0 --query-gpu=memory.free --format=csv,noheader,nounits; }

# A restore without room is final, so it has to be refused also where that is hard to see.
part_room() {
    local size=$((8 * pattern)) before context used
    part "room: for what NVML does not show of a process"
    [ -z "$emulated" ] || {
        fact "of the emulation nothing is learnt"
        return
    }
    # What has just ended gives its memory back a little later.
    sleep 3
    before=$(free_mib)
    counter b1 --pattern-mib "$size"
    answers b1 101
    run stasis ps
    context=$((before - $(free_mib) - size))
    used=$(nvidia-smi --id=0 --query-compute-apps=used_memory --format=csv,noheader,nounits)
    fact "b1 has $size MiB; $((size + context)) MiB are taken, and NVML says that it has $used MiB"
    run stasis suspend b1
    succeeds "suspend"
    # A little more stays than what NVML has said of it, and less than it took.
    counter b2 --pattern-mib $((before - context - used - (size + context - used) / 4))
    answers b2 101
    fact "$(free_mib) MiB are free"
    run stasis resume b1 --timeout 2s
    refuses "no room by some MiB" "nothing is lost"
    run stasis ps
    remove b2
    run stasis resume b1
    succeeds "resume"
    answers b1 102

    part "room: for what NVIDIA's command has suspended"
    if ! command -v cuda-checkpoint >/dev/null; then
        fact "there is no cuda-checkpoint on this machine: nothing is tried"
        remove b1
        return
    fi
    run cuda-checkpoint --toggle --pid "$(pid b1)"
    counter b2 --pattern-mib $((before - size - 2 * context + 64))
    answers b2 101
    fact "$(free_mib) MiB are free, $used were used"
    run stasis resume b1 --timeout 2s
    refuses "no room" "was not noted"
    remove b2
    run stasis resume b1
    succeeds "resume"
    answers b1 103
    remove b1
}

# With drivers from 570 on it is not needed, and does the same.
part_utility() {
    part "utility: NVIDIA's command does what libcuda does otherwise"
    if ! command -v cuda-checkpoint >/dev/null; then
        fact "there is no cuda-checkpoint on this machine: nothing is tried"
        return
    fi
    fact "$(cuda-checkpoint --help 2>&1 | grep -i version || echo 'of the emulation')"
    printf '[log]\nlevel = "debug"\n[cuda]\ninterface = "utility"\n' >/etc/stasis/config.toml
    run stasis check
    counter u1 --pattern-mib "$pattern"
    answers u1 101
    checkpoint u1 utility --leave-running
    succeeds "checkpoint that leaves it running"
    answers u1 102
    checkpoint u1 utility
    succeeds "checkpoint that ends it"
    gone u1
    restore u1 utility
    succeeds "its restore"
    answers u1 103
    run stasis-runc pause u1
    checkpoint u1 paused --leave-running
    succeeds "checkpoint of a paused one"
    is u1 paused
    run stasis-runc resume u1
    answers u1 104
    run stasis suspend u1
    succeeds "suspend"
    run stasis resume u1
    succeeds "resume"
    answers u1 105
    remove u1
    counter u2 --managed
    answers u2 101
    checkpoint u2 managed
    refuses "managed memory" "801"
    is u2 running
    answers u2 102
    remove u2
    printf '[log]\nlevel = "debug"\n' >/etc/stasis/config.toml
}

# only_cards CARD...: $gpu_devices without the other GPUs' nodes.
only_cards() {
    local path card
    local kept=()
    for path in "${all_devices[@]}"; do
        if [[ $path =~ ^/dev/nvidia[0-9]+$ ]]; then
            for card in "$@"; do [ "$path" != "$card" ] || kept+=("$path"); done
        else
            kept+=("$path")
        fi
    done
    gpu_devices=("${kept[@]}")
}

# moved ID IMAGE CARD: a checkpoint that ends it, and its restore into a container with that GPU.
moved() {
    checkpoint "$1" "$2"
    succeeds "a checkpoint of $1"
    gone "$1"
    only_cards "$3"
    config_json "$1" '' counter --ready /data/ready --log /data/log --pattern-mib "$pattern"
    restore "$1" "$2"
    succeeds "its restore on $3"
    gpu_memory "$1 on $3"
}

part_remap() {
    local all_devices=("${gpu_devices[@]}") cards=() path
    part "remap: on another GPU than that of the checkpoint"
    for path in "${all_devices[@]}"; do
        [[ ! $path =~ ^/dev/nvidia[0-9]+$ ]] || cards+=("$path")
    done
    if [ ${#cards[@]} -lt 2 ]; then
        fact "this machine has ${#cards[@]} GPU: nothing is tried"
        return
    fi
    only_cards "${cards[0]}"
    counter r1 --pattern-mib "$pattern"
    answers r1 101
    gpu_memory "r1 on ${cards[0]}"
    moved r1 there "${cards[1]}"
    answers r1 102
    moved r1 back "${cards[0]}"
    answers r1 103
    remove r1

    part "remap: a suspended container is resumed on another GPU"
    only_cards "${cards[0]}" "${cards[1]}"
    counter r2 --pattern-mib "$pattern"
    answers r2 101
    run stasis suspend r2
    run stasis resume r2 --to 1
    succeeds "resume --to 1"
    gpu_memory "r2 on the second"
    answers r2 102
    run stasis suspend r2
    run stasis resume r2 --device-map 1=0,0=1
    succeeds "resume --device-map 1=0,0=1"
    gpu_memory "r2 on the first"
    answers r2 103
    remove r2
    gpu_devices=("${all_devices[@]}")
}
