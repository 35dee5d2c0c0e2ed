# title: the port driver `none`
# limit: 60

check 'it starts' start --port-driver=none $peer serve 0.0.0.0 8080 || give_up "$(tail -n 3 kit.log)"
check_not 'no port is open' outside timeout 5 $peer tcp 192.0.2.2 8080
check 'it ends' stop
complete_scenario
