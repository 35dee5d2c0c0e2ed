# title: passt is killed and started again under a running machine
# limit: 120

exchanged() { grep -c 'RESULT exchanged' console; }
more_than() { [ "$(exchanged)" -gt "$1" ]; }
for transport in stream vhost-user; do
    case $transport in stream) option= ;; *) option=--vhost-user ;; esac
    rm -f socket
    check "$transport: passt starts" start --socket socket $option || give_up 'no passt'
    machine $transport socket loop
    check "$transport: the machine exchanges data" wait_for 60 more_than 3
    kill -KILL "$(cat passt.pid)"
    wait_for 5 gone "$(cat passt.pid)"
    sleep 1
    before=$(exchanged)
    sleep 1
    is "$transport: without passt it does not" "$(exchanged)" "$before"
    check "$transport: passt starts again" start --socket socket $option
    check "$transport: the machine exchanges data again" wait_for 20 more_than $((before + 3))
    check "$transport: a port leads to it" outside tcp 192.0.2.2 2022
    kill $machine
    stop
done
complete_scenario
