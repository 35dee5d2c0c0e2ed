# title: the port driver `implicit`: ports follow the listeners, with the source address
# limit: 60

check 'it starts' start --port-driver=implicit $peer serve 0.0.0.0 8080 || give_up "$(tail -n 3 kit.log)"
is 'TCP from outside' "$(outside tcp 192.0.2.2 8080)" 'client 192.0.2.1'
is 'UDP from outside' "$(outside udp 192.0.2.2 8080)" 'client 192.0.2.1'
check 'it ends' stop
complete_scenario
