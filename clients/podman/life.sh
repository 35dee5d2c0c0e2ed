# title: exec, stop and start, restart, kill, the network follows
# limit: 90

check 'a container starts' start 'serve :: 80' --name web -p 8080:80 || give_up 'no container'
before=$(networks | wc -l)
is 'a command in it reaches the outside' "$(sh_in web 'tcp 198.51.100.1 7000')" 'client 192.0.2.2'
check 'its port answers' outside tcp 192.0.2.2 8080
check 'it is started again' podman restart --time 0 web
check 'its port answers again' outside tcp 192.0.2.2 8080
is 'no process of before is left' "$(networks | wc -l)" "$before"
check 'it is stopped' podman stop --time 0 web
check 'its network ends' wait_for 5 none_left
check 'and started' podman start web
check 'its port answers once more' outside tcp 192.0.2.2 8080
check 'it is killed' podman kill web
check 'its network ends, too' wait_for 5 none_left
remove web >/dev/null
complete_scenario
