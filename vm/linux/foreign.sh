# Network cards of passt (`eth0`) and testpmd (`eth1`), in their own programs (devices-host.sh).

. /vm/linux/passt.sh
# passt maps the gateway to the host's loopback.
GATEWAY=192.0.2.1

exchange() { traffic many $GATEWAY 7003 10 128; }

# check_kill NAME: kills a process of the first card, and checks that data pass again.
check_kill() {
    check "$1 is killed" on_host kill $1
    check "data pass again ($1)" wait_for 20 exchange
}

# check_passt BETWEEN: checks the first card, and kills of passt and of the process between it and the machine.
check_passt() {
    check_card $GATEWAY 2001:db8:1::1
    check 'buffers are merged' features_are_negotiated 15
    check_kill passt
    check_kill $1
}

# check_testpmd NAME INTERFACE NETWORK: checks a card of testpmd, in the network of that prefix.
check_testpmd() {
    ip address add $3.2/24 dev $2
    ip link set $2 up
    check "the host is pinged ($1)" wait_for 20 ping -c 1 -W 5 $3.1
    check "a hundred connections at a time ($1)" traffic many $3.1 7003 100 32
    check "long ones ($1)" traffic many $3.1 7003 10 512
    check "datagrams of every length ($1)" traffic datagrams $3.1 7005 100
}

# scan_testpmd NAME NETWORK: prints the result of a search for a secret in the memory of a testpmd while data pass.
scan_testpmd() { scan $1 traffic many $2.1 7003 10 128; }
