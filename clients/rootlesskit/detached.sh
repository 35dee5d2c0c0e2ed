# title: a network namespace apart from the command (--detach-netns)
# limit: 60

check 'it starts' start --detach-netns sleep 1000 || give_up "$(tail -n 3 kit.log)"
enter() { nsenter --user --preserve-credentials --target $(cat state/child_pid) nsenter --net=/proc/$(cat state/child_pid)/root/$PWD/state/netns "$@"; }
is 'the namespace reaches the outside' "$(enter $peer tcp 198.51.100.1 7000)" 'client 192.0.2.2'
check 'it ends' stop
complete_scenario
