# title: `run --link vhost` for longer: bulk both ways, a thousand connections, every case of `bench uplink`; its link cut off again and again
# set: name
# machine: linux
# limit: 240

. /vm/linux/vhost.sh
load_modules vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
create_outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
outside traffic echo 7003 &
outside traffic return 7004 &
# Beyond 65,536 frames, where the indices of queues wrap.
check 'ten thousand datagrams' run_guest '' 65520 traffic datagrams 10.78.0.2 7004 10000
for options in '' '--protect fine'; do
    for mtu in 65520 9000 1500; do
        check_sending "$options" $mtu 256
        check_receiving "$options" $mtu 256
    done
done
check 'a thousand connections at a time' run_guest '' 1500 traffic many 10.78.0.2 7003 1000 16
for round in 1 2 3 4 5; do
    check_link_loss "its interface is deleted, round $round" remove_interface
    check_link_loss "its process is killed, round $round" kill_uplink
done
check_sending '' 65520 32
# Whatever is measured: no row may fail.
check 'every case of bench uplink' ringfence-bench uplink --link vhost --congestion cubic --seconds 1
complete_scenario
