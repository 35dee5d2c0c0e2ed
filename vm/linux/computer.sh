# For machines of the kind linux-programs: the files of the computer that emulates them, to be read.

COMPUTER=/computer

# enter_computer: makes a root of the computer's files, unless an earlier scenario of this boot has made it. Its changes are
# kept in memory, and end with the machine.
enter_computer() {
    [ ! -e /untouched/etc ] || return 0
    mkdir -p $COMPUTER /untouched
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose computer /untouched &&
        mount --bind /untouched $COMPUTER || return
    local each
    for each in tmp run var/tmp root home; do
        mount -t tmpfs none $COMPUTER/$each
    done
    for each in dev proc sys; do
        mount --bind /$each $COMPUTER/$each
    done
    # Its passwords are its own, and cannot be read where the computer's user is not root: sshd takes that for a locked account.
    echo 'root:*:20000:0:99999:7:::' >/shadow && mount --bind /shadow $COMPUTER/etc/shadow
    # Shells of tests have a place for what is shared by all.
    mkdir -p $COMPUTER/dev/shm
    mount -t tmpfs shm $COMPUTER/dev/shm
    mount --bind /dev/pts $COMPUTER/dev/pts
    # Built files may lie in one of the folders that are memory now.
    mkdir -p $COMPUTER$TARGET && mount --bind /untouched$TARGET $COMPUTER$TARGET
}

# in_computer COMMAND...: runs a command on that root. A process that is only in a chroot may create no user
# namespaces, so the root is pivoted.
in_computer() {
    LINK=${LINK:-} unshare -m sh -c '
        mkdir -p "$0/tmp/machine" && cd "$0" && pivot_root . tmp/machine || exit
        exec chroot . /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
            LANG=C.UTF-8 TMPDIR=/tmp RINGFENCE_TEST_LINK=$LINK "$@"
    ' $COMPUTER "$@"
}

# integration_test NAME ARGUMENT...: runs an integration test on that root. Its host network is that of the machine.
integration_test() {
    local each file=
    for each in $TESTS; do
        [ ${each%%=*} != $1 ] || file=${each#*=}
    done
    shift
    in_computer "$file" "$@"
}

# list_cases NAME FILTER...: prints the cases of this test program whose names contain a filter, one a line: the
# program's name and the case's.
list_cases() {
    integration_test "$@" --list | sed -n "s/^\(.*\): test$/$1 \1/p"
}

# can_have_guests: succeeds if tests can create the namespaces that they need.
can_have_guests() {
    in_computer /usr/bin/unshare --user --map-root-user --pid --fork true
}

# use_vhost: checks that tests can have guests over vhost-net, which they use from now on.
use_vhost() {
    LINK=vhost
    load_modules vhost_net
    check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
    check 'the files of the computer are there' enter_computer || give_up 'no programs'
    check 'guests can be made of them' can_have_guests || give_up 'no guests'
}

# check_case NAME CASE: checks one case of a test. A case without a program of this computer is skipped, in part or as
# a whole.
check_case() {
    local why
    if ! integration_test $1 --exact $2 --include-ignored --nocapture >/tmp/case.out 2>&1; then
        cat /tmp/case.out
        not_ok "$2" "$(grep -A 3 panicked /tmp/case.out | tr '\n' ' ')"
        return
    fi
    cat /tmp/case.out
    why=$(sed -n 's/^.*SKIPPED: //p' /tmp/case.out | head -n 1)
    if [ -z "$why" ]; then ok "$2"; else skip "$2" "$why"; fi
}

# check_cases NAME FILTER...: checks each case of a test whose name contains a filter.
check_cases() {
    local name each ran=0
    list_cases "$@" >/tmp/cases
    check 'the tests have cases' test -s /tmp/cases
    while read -r name each; do
        check_case $name $each </dev/null
        ran=$((ran + 1))
    done </tmp/cases
    is 'each case was run' $ran $(wc -l </tmp/cases)
}
