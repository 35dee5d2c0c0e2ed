# title: the kernel's selftests for network drivers in a guest with our driver, and with xen-netfront
# set: name
# machine: xen
# limit: 900
# driver: netfront
# kernel: newest
# parts: selftests

. /vm/xen/staging.sh
. /vm/xen/driver.sh

# Root of the file system of the tests, in guests and in dom0.
ROOT=/selftests
TESTS=/kernel/tools/testing/selftests
WIRED=10.77.0.9
WIRED6=fd77::9

# in_root DOMAIN COMMAND: runs a command in the root of the tests.
in_root() {
    local name=$1
    shift
    ON_LIMIT=${ROOT_LIMIT:-120} on $name "chroot $ROOT /bin/bash -c '$*'"
}

# prepare_root DOMAIN: gives the root of the tests what they need.
prepare_root() {
    on $1 "for each in proc sys dev; do mount --rbind /\$each $ROOT/\$each; done;
        sh /vm/xen/selftests/adapt.sh $ROOT$TESTS;
        echo 1 >/proc/sys/net/ipv6/conf/all/keep_addr_on_down;
        cp /vm/xen/selftests/*.py $ROOT$TESTS/drivers/net/lib/py/; echo 127.0.0.1 localhost >$ROOT/etc/hosts"
    in_root $1 '/bin/busybox --install -s >/dev/null 2>&1; mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null;
        python3 -c "import json, socket, subprocess, yaml" && ip -json link show lo >/dev/null'
}

# tap_results: converts lines of TAP to lines `TEST RESULT`.
tap_results() {
    tr -d '\r' | sed -nE 's/^(not ok|ok) [0-9]+ ([^ ]+).*# (SKIP|XFAIL).*/\2 \3/p; t; s/^ok [0-9]+ ([^ ]+).*/\1 pass/p; t
        s/^not ok [0-9]+ ([^ ]+).*/\1 FAIL/p'
}

# run_python_test TEST: runs one of the Python tests in guest one, with dom0 as its remote endpoint. Appends its
# results to $RESULTS_OF, and `TEST.end none` if it did not reach its end.
run_python_test() {
    local output ROOT_LIMIT=300
    output=$(in_root one "cd $TESTS/drivers/net && NETIF=eth0 LOCAL_V4=10.77.0.11 REMOTE_V4=$ADDRESS LOCAL_V6=fd77::11 \
        REMOTE_V6=$ADDRESS6 REMOTE_TYPE=dom0 REMOTE_ARGS=$ADDRESS timeout 2200 python3 -u $1.py 2>&1")
    echo "$output"
    echo "$output" | tap_results >>$RESULTS_OF
    echo "$output" | grep -q '^# Totals:' || echo "${1##*/}.end none" >>$RESULTS_OF
}

# run_rss_test: runs the test of receive hashing, and once more if the case that depends on its random key failed. A
# Toeplitz hash is linear, and the ports of the 16 streams are consecutive: with 7 of 100 keys a queue that should
# have streams has none.
run_rss_test() {
    run_python_test hw/rss_ctx
    grep -q '^rss_ctx.test_rss_key_indir FAIL' $RESULTS_OF || return 0
    sed -i '/^rss_ctx\./d' $RESULTS_OF
    run_python_test hw/rss_ctx
}

# run_netdevice_test: runs the shell test of all interfaces, which needs one that is down and has no address.
run_netdevice_test() {
    local output address=$(on one 'cat /sys/class/net/eth0/address' | tr -d '\r')
    on one 'ip link set eth0 down; ip address flush dev eth0'
    output=$(in_root one "cd $TESTS/net && sh netdevice.sh 2>&1")
    echo "$output"
    echo "$output" | tr -d '\r' | awk '/^(PASS|FAIL|XFAIL|SKIP): eth0: / {
        result = $1 == "PASS:" ? "pass" : substr($1, 1, length($1) - 1)
        sub(/^[A-Z]*: eth0: /, ""); gsub(/[: ]+/, "-"); print "netdevice." $0, result }' >>$RESULTS_OF
    on one "ip link set eth0 address $address"
    assign_addresses one 11
}

# create_wire: creates a network namespace in dom0 behind an interface that completes checksums, as a network card
# does. Other interfaces inside of a computer do not. Sets WIRE to a command that enters it.
create_wire() {
    modprobe veth
    setsid unshare -n sleep 100000 &
    WIRE="nsenter -t $! -n"
    wait_for 10 has_own_network $! && chroot $ROOT /bin/ip link add wire0 type veth peer name wire1 netns $! &&
        chroot $ROOT ethtool -K wire0 tx off && ip link set wire0 master xenbr0 && ip link set wire0 up &&
        $WIRE chroot $ROOT /bin/ip address add $WIRED/24 dev wire1 && $WIRE chroot $ROOT /bin/ip link set wire1 up &&
        $WIRE chroot $ROOT /bin/ip address add $WIRED6/64 dev wire1 nodad
}

# run_csum_tests: runs the cases of hw/csum.py, whose version in Linux 6.12 imports a name that its library does not
# have.
run_csum_tests() {
    local version bad ours remote wired
    # fq_codel drops packets that an emulated computer takes too long to send.
    on one "chroot $ROOT /usr/sbin/tc qdisc replace dev eth0 root pfifo limit 1000"
    for version in 4 6; do
        case $version in
            4) ours=10.77.0.11 remote=$ADDRESS wired=$WIRED ;;
            6) ours=fd77::11 remote=$ADDRESS6 wired=$WIRED6 ;;
        esac
        for bad in '' '-E'; do
            run_csum_case "ipv${version}_rx_tcp${bad:+_invalid}" one eth0 dom0 xenbr0 "-$version -S $remote -D $ours -r 1 -t $bad"
            run_csum_case "ipv${version}_rx_udp${bad:+_invalid}" one eth0 dom0 xenbr0 "-$version -S $remote -D $ours -r 1 $bad"
        done
        IN=$WIRE
        run_csum_case ipv${version}_tx_udp_csum_offload dom0 wire1 one eth0 "-$version -S $ours -D $wired -U -r 1"
        run_csum_case ipv${version}_tx_udp_zero_checksum dom0 wire1 one eth0 "-$version -S $ours -D $wired -U -Z"
        IN=
    done
}

# run_csum_case CASE TO INTERFACE FROM INTERFACE OPTIONS: sends 100 packets from one domain to the other. The
# receiver, in the namespace that the command IN enters, judges them. It listens long enough (-L, seconds) for the
# sender to start.
run_csum_case() {
    local result=FAIL
    on $2 "rm -f /tmp/csum; (${IN:-} chroot $ROOT $TESTS/net/lib/csum -i $3 -L 20 -n 100 $6 -R >/tmp/csum.log 2>&1; echo \$? >/tmp/csum) &
        wait_for 5 ${IN:-} grep -q :84D0 /proc/net/udp /proc/net/udp6"
    in_root $4 "$TESTS/net/lib/csum -i $5 -n 100 $6 -T"
    on $2 "wait_for 30 test -s /tmp/csum; tail -n 3 /tmp/csum.log; [ \"\$(cat /tmp/csum)\" = 0 ]" && result=pass
    echo "program.$1 $result" >>$RESULTS_OF
}

# run_all_tests DRIVER: runs the tests in a guest with this driver, and checks its kernel log.
run_all_tests() {
    RESULTS_OF=/share/selftests-$1
    prepare_guest $1
    run_netdevice_test
    run_python_test ping
    run_python_test queues
    run_python_test stats
    run_rss_test
    run_python_test hw/pp_alloc_fail
    run_csum_tests
    check_kernel_log one
    check_destruction one
}

# test_results DRIVER PROGRAM: prints the results of the program's tests with this driver.
test_results() {
    grep "^$2\." /share/selftests-$1 | sort | tr '\n' ' '
}

# check_results PROGRAM: checks that the program's tests ran with our driver, that none failed, and that none passed
# with xen-netfront alone.
check_results() {
    local ours=$(test_results $DRIVER $1) theirs=$(test_results vif $1)
    note "$1: $ours"
    note "$1 with xen-netfront: $theirs"
    is "$1: fails" "${ours:+ran }$(grep -E "^$1\..* (FAIL|none)$" /share/selftests-$DRIVER)" 'ran '
    is "$1: passes with xen-netfront alone" "$(passed_tests vif $1 | grep -vxF "$(passed_tests $DRIVER $1; echo none)")" ''
}

# passed_tests DRIVER PROGRAM: prints the program's tests that passed.
passed_tests() {
    sed -n "s/^\($2\..*\) pass$/\1/p" /share/selftests-$1
}

# prepare_guest DRIVER: checks that a guest with this driver starts and can run the tests.
prepare_guest() {
    create_networked_guest one 11
    check "$1: the guest's driver" uses_driver one $1
    check "$1: the tests can run" prepare_root one || give_up 'without their file system there is nothing to run'
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 8'
# The file system of the tests is in it twice, and the first root file system has half of the memory.
mount -o remount,size=800m /
mkdir -p $ROOT
(cd / && cpio -id </boot/selftests.cpio) 2>/dev/null
check 'dom0: the tests can run' prepare_root dom0
check 'dom0: a receiver behind a wire' create_wire
# The tests count packets, and an emulated computer sends few large ones a second.
chroot $ROOT ethtool -K xenbr0 tso off gso off
chroot $ROOT python3 $TESTS/drivers/net/lib/py/server.py >/share/selftests-server.log 2>&1 &
guests_with tools driver newest selftests
KERNEL=/boot/vmlinuz-newest MEMORY=512 VCPUS=4
run_all_tests $DRIVER
EXTRA=driver=xen-netfront
run_all_tests vif
for each in netdevice ping queues stats rss_ctx pp_alloc_fail program; do check_results $each; done
complete_scenario
