# Completion of stasis-runc(8) for fish: the command line is runc's.

set -l commands checkpoint create delete events exec features help kill list pause ps restore resume \
    run spec start state update
set -l with_container checkpoint delete events exec kill pause ps resume start state update
set -l none "not __fish_seen_subcommand_from $commands"

function __stasis_runc_containers
    # With the --root that is given.
    set -l words (commandline -opc)
    set -l at (contains -i -- --root $words)
    and set -l root --root $words[(math $at + 1)]
    stasis-runc $root list --quiet 2>/dev/null
end

complete -c stasis-runc -f
complete -c stasis-runc -n $none -a checkpoint -d 'Write a container to disk'
complete -c stasis-runc -n $none -a create -d 'Create a container'
complete -c stasis-runc -n $none -a delete -d 'Remove a container'
complete -c stasis-runc -n $none -a events -d 'Statistics of a container'
complete -c stasis-runc -n $none -a exec -d 'Run a process in a container'
complete -c stasis-runc -n $none -a features -d 'What the runtime supports'
complete -c stasis-runc -n $none -a help -d 'Print help'
complete -c stasis-runc -n $none -a kill -d 'Send a signal to a container'
complete -c stasis-runc -n $none -a list -d 'List containers'
complete -c stasis-runc -n $none -a pause -d 'Suspend a container'
complete -c stasis-runc -n $none -a ps -d 'List processes of a container'
complete -c stasis-runc -n $none -a restore -d 'Start a container from disk'
complete -c stasis-runc -n $none -a resume -d 'Go on with a paused container'
complete -c stasis-runc -n $none -a run -d 'Create and start a container'
complete -c stasis-runc -n $none -a spec -d 'Write a config.json'
complete -c stasis-runc -n $none -a start -d 'Start a created container'
complete -c stasis-runc -n $none -a state -d 'Print the state of a container'
complete -c stasis-runc -n $none -a update -d 'Change limits of a container'

complete -c stasis-runc -n $none -l debug -d 'Log debugging messages'
complete -c stasis-runc -n $none -l log -rF -d 'Write the log to a file'
complete -c stasis-runc -n $none -l log-format -xa 'text json' -d 'Form of the log'
complete -c stasis-runc -n $none -l root -rF -d 'Directory of the state'
complete -c stasis-runc -n $none -l systemd-cgroup -d "Cgroups are systemd's"
complete -c stasis-runc -n $none -s v -l version -d 'Print the version'
complete -c stasis-runc -s h -l help -d 'Print help'

complete -c stasis-runc -n "__fish_seen_subcommand_from $with_container" -a '(__stasis_runc_containers)'
set -l criu '__fish_seen_subcommand_from checkpoint restore'
complete -c stasis-runc -n $criu -l image-path -rF -d 'Where the image is'
complete -c stasis-runc -n $criu -l work-path -rF -d 'Where CRIU works and logs'
complete -c stasis-runc -n $criu -l tcp-established -d 'Keep established TCP connections'
complete -c stasis-runc -n $criu -l ext-unix-sk -d 'Allow UNIX sockets to outside'
complete -c stasis-runc -n $criu -l shell-job -d 'Allow a terminal from outside'
complete -c stasis-runc -n $criu -l file-locks -d 'Keep file locks'
complete -c stasis-runc -n '__fish_seen_subcommand_from checkpoint' -l leave-running -d 'The container runs on'
complete -c stasis-runc -n '__fish_seen_subcommand_from restore' -s d -l detach -d 'Leave the container in the background'
complete -c stasis-runc -n '__fish_seen_subcommand_from create restore run' -s b -l bundle -rF -d 'Directory of config.json'
complete -c stasis-runc -n '__fish_seen_subcommand_from create restore run' -l pid-file -rF -d 'Write the pid to a file'
complete -c stasis-runc -n '__fish_seen_subcommand_from create restore run' -l console-socket -rF -d 'Socket that gets the terminal'
complete -c stasis-runc -n '__fish_seen_subcommand_from delete' -s f -l force -d 'Also one that runs'
complete -c stasis-runc -n '__fish_seen_subcommand_from list' -s q -l quiet -d 'Ids only'
complete -c stasis-runc -n '__fish_seen_subcommand_from list' -s f -l format -xa 'table json' -d 'Form of the list'
