# title: `run --link vhost` for longer: bulk both ways, a thousand connections, every case of `bench uplink`; its link cut off again and again
# set: name
# machine: linux
# limit: 240

. /vm/linux/vhost.sh
load vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2 || give_up 'no network'
over_there traffic echo 7003 &
over_there traffic return 7004 &
# Beyond 65,536 frames, where the indices of queues wrap.
check 'ten thousand datagrams' over vhost 65520 traffic datagrams 10.78.0.2 7004 10000
for OPTIONS in '' '--protect fine'; do
    for mtu in 65520 9000 1500; do
        sends vhost $mtu 256
        is_sent_to vhost $mtu 256
    done
done
OPTIONS=
check 'a thousand connections at a time' over vhost 1500 traffic many 10.78.0.2 7003 1000 16
for round in 1 2 3 4 5; do
    cut_off "its interface is deleted, round $round" remove_interface
    cut_off "its process is killed, round $round" kill_uplink
done
sends vhost 65520 32
# Whatever is measured: no row may fail.
check 'every case of bench uplink' ringfence-bench uplink --link vhost --congestion cubic --seconds 1
complete
