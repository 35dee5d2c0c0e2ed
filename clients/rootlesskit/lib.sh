# Helpers for the scenarios of RootlessKit. $CLIENT is the program under test.

note "$($CLIENT --version)"
peer='python3 /clients/peer.py'

# kit OPTION... -- COMMAND...: runs a command below RootlessKit, with the options of every scenario.
options="--net=${net:-pasta} --copy-up=/etc --copy-up=/run"
kit() { $CLIENT $options "$@"; }
# start OPTION... -- COMMAND...: the same in the background, in the state directory `state`.
start() {
    rm -rf state
    $CLIENT $options --state-dir=$PWD/state "$@" >kit.log 2>&1 &
    kit=$!
    wait_for 15 test -s state/child_pid
}
stop() {
    kill $kit
    wait $kit
    wait_for 10 none_left
}
