# title: a build whose command uses the network
# limit: 60

# The overlay that Podman 6 mounts over the build context needs a file system that is none itself.
export TMPDIR=/tmp
mkdir build
cat >build/Containerfile <<'END'
FROM base
RUN python3 /clients/peer.py tcp 198.51.100.1 7000 >/got
END
check 'a build reaches the outside' podman build --volume /usr:/usr:ro --volume /clients:/clients:ro --network pasta --tag built build
is 'it has the answer' "$(podman run --rm built cat /got)" 'client 192.0.2.2'
complete_scenario
