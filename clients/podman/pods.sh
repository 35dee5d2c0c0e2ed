# title: a pod has one network: two containers, ports, names, its end
# limit: 60

check 'a pod with a port is made' podman pod create --name pod -p 8080:80 || give_up 'no pod'
check 'a server starts in it' start 'serve :: 80' --pod pod --name web
before=$(networks | wc -l)
check 'a second container starts' start 'sleep 1000' --pod pod --name client
is 'the two share the loopback' "$(sh_in client 'tcp 127.0.0.1 80')" 'client 127.0.0.1'
is 'the port leads to the server' "$(outside tcp 192.0.2.2 8080)" 'client 192.0.2.1'
is 'the second one reaches the outside' "$(sh_in client 'tcp 198.51.100.1 7000')" 'client 192.0.2.2'
is 'no further process serves it' "$(networks | wc -l)" "$before"
check 'the pod is removed' podman pod rm --force --time 0 pod
check 'its network ends' wait_for 5 none_left
complete_scenario
