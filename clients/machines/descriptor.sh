# title: passt with an inherited socket (--fd), by a stream and by vhost-user
# limit: 90

# inherits TRANSPORT OPTION...: starts a machine, and a passt that inherits its connection.
inherits() {
    local transport=$1
    shift
    rm -f console
    eval "set -- $(words $transport socket | tr '\n' ' ') -- $*"
    python3 /clients/machines/pair.py socket "$@" >qemu.log 2>&1 &
    machine=$!
}
for transport in stream vhost-user; do
    case $transport in stream) option= ;; *) option=--vhost-user ;; esac
    inherits $transport $option --no-map-gw -t 2022:22
    results $transport
    kill $machine
    check "$transport: both end" wait_for 5 none_left
done
complete_scenario
