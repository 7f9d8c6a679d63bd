# shellcheck shell=bash disable=SC2034  # its variables are for the scripts that read it
# Shared by the lab's scripts: where a lab lies and how they speak.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
project=$(cd "$here/../.." && pwd -P)
lab=${STASIS_LAB:-$project/target/lab}
# The oldest and the newest Debian whose containerd Stasis is tested with.
suites=(trixie forky)
suite=${STASIS_SUITE:-trixie}
# Whose CRIU and Go all of them take.
newest=forky
root=$lab/$suite
# What no Debian has: nerdctl and crictl, the same files for all labs.
tools=$lab/tools

say() { printf 'lab: %s\n' "$*"; }
die() {
    printf 'lab: error: %s\n' "$*" >&2
    exit 1
}

need_root() {
    [ "$(id -u)" -eq 0 ] || die "this needs root (it mounts and makes namespaces); run it as root: sudo $0"
}

need_commands() {
    local command
    for command in "$@"; do
        command -v "$command" >/dev/null ||
            die "'$command' is missing; run $here/prerequisites"
    done
}

need_suite() {
    local known
    for known in "${suites[@]}"; do [ "$known" != "$1" ] || return 0; done
    die "there is no lab '$1', only ${suites[*]}"
}

# Debian's own paths: a host's PATH says nothing about the lab's.
lab_path=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

# The cgroups of one lab, in all hierarchies, inner ones first.
lab_cgroups() { find /sys/fs/cgroup -depth -type d -path "*/$1*" 2>/dev/null || true; }

# A frozen process of cgroup v1 does not die of SIGKILL, and would keep its pid namespace.
thaw_lab() {
    local cgroup
    lab_cgroups "$1" | while read -r cgroup; do
        [ ! -e "$cgroup/freezer.state" ] || echo THAWED >"$cgroup/freezer.state" || true
        [ ! -e "$cgroup/cgroup.freeze" ] || echo 0 >"$cgroup/cgroup.freeze" || true
    done 2>/dev/null
}
