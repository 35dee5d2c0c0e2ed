# For machines of the kind linux-programs: the files of the computer that emulates them, to be read.

COMPUTER=/computer

# enter_computer: makes a root of them. What is written is written to memory, and goes with the machine.
enter_computer() {
    mkdir -p $COMPUTER /untouched
    mount_computer $COMPUTER && mount_computer /untouched || return
    local each
    for each in tmp run var/tmp root home; do
        mount -t tmpfs none $COMPUTER/$each
    done
    for each in dev proc sys; do
        mount --bind /$each $COMPUTER/$each
    done
    # Shells of tests have a place for what is shared by all.
    mkdir -p $COMPUTER/dev/shm
    mount -t tmpfs shm $COMPUTER/dev/shm
    mount --bind /dev/pts $COMPUTER/dev/pts
    # What was built may lie in one of the folders that are memory now.
    mkdir -p $COMPUTER$TARGET && mount --bind /untouched$TARGET $COMPUTER$TARGET
}

mount_computer() {
    mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=1048576,cache=loose computer $1
}

# integration_test NAME ARGUMENT...: runs that test there. The host's network is the machine's.
integration_test() {
    local each file=
    for each in $TESTS; do
        [ ${each%%=*} != $1 ] || file=${each#*=}
    done
    shift
    chroot $COMPUTER env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root \
        LANG=C.UTF-8 TMPDIR=/tmp RINGFENCE_TEST_LINK=$LINK "$file" "$@"
}

# cases NAME...: those of these tests, a line each: the test's name, its own.
cases() {
    local each
    for each in "$@"; do
        integration_test $each --list | sed -n "s/^\(.*\): test$/$each \1/p"
    done
}

# case_of NAME CASE: a check of one case. Of a program that this computer has not, it is skipped.
case_of() {
    local why
    check "$2" integration_test $1 --exact $2 --nocapture || return
    why=$(sed -n 's/^SKIPPED: //p' /tmp/check.out | head -n 1)
    [ -z "$why" ] || note "$2 has skipped: $why"
}
