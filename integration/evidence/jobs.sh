# Processes that share GPU memory: part `jobs` of checks.
#
# shellcheck shell=bash disable=SC2154  # what is not set here is set in checks
#
# `ipc N` are N processes, the first of which exports memory that the others import by
# cuIpcGetMemHandle. At each datagram every one of them adds one, and looks whether it sees what all
# have added: it answers 100 + N, 100 + 2 N and so on.

job='"dev.stasis.job":"file"'
several='"dev.stasis.multi-process":"allow"'

# The driver's branch: 580 for 580.159.04.
branch() {
    local version
    if [ -z "$emulated" ]; then
        version=$(nvidia-smi --id=0 --query-gpu=driver_version --format=csv,noheader)
    else
        version=$(sed -n 's/^driver=//p' /dev/nvidia-emulated/config)
    fi
    echo "${version%%.*}"
}

# ipc ID ANNOTATIONS N [OPTION...]: starts them.
ipc() {
    local id=$1 annotations=$2
    shift 2
    # Two such containers are to find room.
    bundle "$id" "$annotations" ipc --mib "$(((pattern + 1) / 2))" --ready /data/ready "$@"
    start "$id" ready
}

# digest DIRECTORY: of all that is in it.
digest() { (cd "$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum) | sha256sum | cut -c 1-16; }

# unchanged WHAT DIRECTORY DIGEST
unchanged() {
    if [ "$(digest "$2")" = "$3" ]; then pass "$1: the image is unchanged"; else fail "$1: the image has changed"; fi
}

part_jobs() {
    local branch
    branch=$(branch)
    fact "driver branch $branch; cuda-checkpoint: $(command -v cuda-checkpoint || echo none)"
    if [ "${branch:-0}" -lt 610 ]; then
        jobs_are_refused "$branch"
        shared_memory_is_lost
    else
        jobs_keep_shared_memory
    fi
    nothing_is_shared
}

jobs_are_refused() {
    part "jobs: refused with a driver that has none that keep shared memory"
    bundle j0 "$job" ipc 4 --ready /data/ready
    launch stasis-runc run --detach --bundle "$bundles/j0" --pid-file "$bundles/j0/pid" j0
    refuses "a container with the annotation" "driver $1."
    refuses "a container with the annotation" "needs branch 610 or later"
    is j0 ''
    if [ ! -d /run/stasis ] || [ -z "$(find /run/stasis -name '*.job')" ]; then
        pass "no job directory is left"
    else
        fail "no job directory is left"
    fi
    rm -rf "${bundles:?}/j0"

    part "jobs: processes that share memory, refused without a job"
    ipc j1 '' 4
    answers j1 104
    checkpoint j1 shared
    refuses "a checkpoint" "dev.stasis.job=file, which needs driver branch 610"
    refuses "a checkpoint" "dev.stasis.multi-process=allow"
    answers j1 108
    # The driver does not know the variable.
    remove j1
    container_environment+=(CUDA_CHECKPOINT_JOB_FILE=/data/job)
    ipc j1 '' 2
    container_environment=("${container_environment[0]}")
    answers j1 102
    checkpoint j1 shared
    refuses "with the variable" "dev.stasis.multi-process=allow"
    remove j1
}

shared_memory_is_lost() {
    local before
    part "jobs: what is shared is lost, and told as what it is (leave-running)"
    ipc j2 "$several" 4
    answers j2 104
    checkpoint j2 lost --leave-running
    refuses "a checkpoint of what cannot come back" "GPU memory that it shared with another process or GPU is lost"
    refuses "a checkpoint of what cannot come back" "the container was killed"
    refuses "a checkpoint of what cannot come back" "the image in $images/lost is kept"
    is j2 stopped
    run stasis inspect "$images/lost"
    succeeds "the image is whole"
    gpu_memory "after it was killed"
    remove j2

    part "jobs: what is shared is lost, and told as what it is (restored)"
    ipc j3 "$several" 4
    answers j3 104
    checkpoint j3 lost
    succeeds "a checkpoint"
    gone j3
    before=$(digest "$images/lost")
    for _ in 1 2; do
        restore j3 lost
        refuses "a restore" "GPU memory that it shared with another process or GPU is lost"
        refuses "a restore" "what had been restored was killed"
        is j3 ''
        unchanged "after a restore" "$images/lost" "$before"
    done
    gpu_memory "after the restores"
    remove j3
}

jobs_keep_shared_memory() {
    local n
    part "jobs: processes that share memory, in a job by annotation"
    ipc j4 "$job" 4
    answers j4 104
    for n in 108 112 116; do
        checkpoint j4 kept --leave-running
        succeeds "a checkpoint that leaves it running"
        answers j4 "$n"
    done
    run stasis-runc pause j4
    checkpoint j4 kept --leave-running
    succeeds "a checkpoint of it paused"
    run stasis-runc resume j4
    answers j4 120
    checkpoint j4 kept
    succeeds "a checkpoint that ends it"
    gone j4
    run stasis inspect "$images/kept"
    succeeds "the image is whole"
    bundle j5 "$job" ipc 4 --ready /data/ready
    # Its output goes on.
    cp "$(data j4)/out" "$(data j5)/out"
    restore j4 kept
    succeeds "a restore"
    restore j5 kept
    succeeds "another of the same image"
    for n in 124 128; do
        answers j4 "$n"
        answers j5 "$n"
    done
    stasis-runc delete --force j5
    rm -rf "${bundles:?}/j5"
    remove j4

    part "jobs: processes that share memory, in a job of their own"
    bundle j6 '' cuda-checkpoint --launch-job /bin/ipc 4 --mib "$(((pattern + 1) / 2))" --ready /data/ready
    cp "$(command -v cuda-checkpoint)" "$bundles/j6/rootfs/bin/cuda-checkpoint"
    start j6 ready
    answers j6 104
    checkpoint j6 own --leave-running
    succeeds "a checkpoint that leaves it running"
    answers j6 108
    checkpoint j6 own
    succeeds "a checkpoint that ends it"
    gone j6
    restore j6 own
    succeeds "a restore"
    answers j6 112
    remove j6
}

nothing_is_shared() {
    part "jobs: processes that share nothing, without a job"
    # Together as much as the others.
    ipc j7 "$several" 4 --no-share --mib "$(((pattern + 7) / 8))"
    answers j7 104
    checkpoint j7 private --leave-running
    succeeds "a checkpoint that leaves it running"
    answers j7 108
    checkpoint j7 private
    succeeds "a checkpoint that ends it"
    gone j7
    restore j7 private
    succeeds "a restore"
    answers j7 112
    remove j7
}
