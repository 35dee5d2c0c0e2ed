# title: Podman's own tests of pasta (--podman-tests)
# limit: 420

file=/podman-tests/505-networking-pasta.bats
[ -f $file ] || {
    skip "Podman's own tests" 'no --podman-tests FOLDER: test/system of the source of this version of Podman'
    complete_scenario
    exit 0
}
# Their image, with the programs of this system: /usr of the host is in every container.
mkdir -p image/opt/bin image/home/podman
ln -s /usr/bin/busybox image/opt/bin/nslookup
cat >image/home/podman/bytecheck <<'END'
#!/bin/sh
# Says what came on the standard input: bytes and hash.
cat >/tmp/came.$$
echo "$(wc -c </tmp/came.$$) bytes, $(sha256sum </tmp/came.$$)"
END
chmod +x image/home/podman/bytecheck
tar -C image -c . | podman import --quiet --change WORKDIR=/home/podman --change CMD='["/bin/true"]' \
    --change 'ENV PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
    - quay.io/libpod/testimage:own >/dev/null || give_up 'no image'

# They follow the log of a container until it ends, for which Podman reads events.
sed -i 's/^events_logger = .*/events_logger = "file"/; s/^\[containers\]/&\nlog_driver = "k8s-file"/' ~/.config/containers/containers.conf
# They bind ports at addresses of the host's interface, and look up l.root-servers.net (peer.py).
cd /podman-tests || exit 1
PODMAN_TEST_IMAGE_TAG=own BATS_TMPDIR=/tmp TMPDIR=/tmp bats --tap $file 2>&1 | tee /tmp/tap | while read -r line; do
    name=${line#*\] }
    case $line in
        'ok '*' # skip'*) skip "${name%% \# skip*}" "${line#*\# skip }" ;;
        'ok '*) ok "$name" ;;
        'not ok '*) not_ok "$name" 'the log has the reason' ;;
    esac
done
cat /tmp/tap
is "each of Podman's own tests has a result" "$(grep -cE '^(not )?ok ' /tmp/tap)" "$(grep -c '^@test ' $file)"
complete_scenario
