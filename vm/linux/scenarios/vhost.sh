# title: `run --link vhost`: transfers both ways over the kernel's vhost-net
# set: name
# machine: linux
# limit: 120

plan 6
load vhost_net
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
outside
check 'outside answers' ping -c 1 -W 5 10.78.0.2
check 'a guest pings outside' ringfence run --switch none --link vhost -v -- ping -c 2 -W 5 10.78.0.2
over_there sh -c 'traffic receive 7000 >/tmp/sum' &
check 'a guest sends' ringfence run --switch none --link vhost -- traffic send 10.78.0.2 7000 32
is 'all of it arrived' "$(cat /tmp/sum)" "$(traffic sum 32)"
ringfence run --switch none --link vhost -p 7001:7001 -- traffic receive 7001 >/tmp/sum2 &
GUEST=$!
wait_for 10 over_there traffic send 10.78.0.1 7001 32
wait $GUEST
is 'a guest receives' "$(cat /tmp/sum2)" "$(traffic sum 32)"
