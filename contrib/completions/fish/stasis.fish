# Completion of stasis(1) for fish.

complete -c stasis -f
complete -c stasis -n __fish_use_subcommand -a check -d 'Is this host ready?'
complete -c stasis -n __fish_use_subcommand -a inspect -d 'What is in an image?'
complete -c stasis -n __fish_use_subcommand -s V -l version -d 'Print the version'
complete -c stasis -s h -l help -d 'Print a summary'
complete -c stasis -n '__fish_seen_subcommand_from check inspect' -l json -d 'For machines'
complete -c stasis -n '__fish_seen_subcommand_from inspect' -xa '(__fish_complete_directories)'
