# avahi.sh FOLDER NAME INTERFACE SCRIPT: runs a script on a host called NAME.local, whose Avahi uses INTERFACE. FOLDER is
# for the files of its D-Bus. Avahi needs a /run of its own.
set -eu
folder=$1 name=$2 interface=$3 script=$4
[ -n "${OWN_RUN:-}" ] || OWN_RUN=1 exec unshare --mount sh "$0" "$@"
mount -t tmpfs run /run
mkdir -p "$folder" /run/avahi-daemon
cat >"$folder/bus.conf" <<END
<busconfig>
  <listen>unix:path=$folder/bus</listen>
  <auth>EXTERNAL</auth>
  <policy context="default"><allow own="*"/><allow send_destination="*"/><allow receive_sender="*"/></policy>
</busconfig>
END
cat >"$folder/avahi.conf" <<END
[server]
host-name=$name
allow-interfaces=$interface
[wide-area]
enable-wide-area=no
END
export DBUS_SYSTEM_BUS_ADDRESS="unix:path=$folder/bus"
dbus-daemon --config-file="$folder/bus.conf" --nofork --nopidfile &
bus=$!
until [ -S "$folder/bus" ]; do sleep 0.05; done
avahi-daemon --file="$folder/avahi.conf" --no-drop-root --no-chroot --no-rlimits --no-proc-title &
avahi=$!
until [ "$(avahi-resolve --name "$name.local" -4 2>/dev/null)" ]; do sleep 0.1; done
avahi-publish --service "service of $name" _ringfence._tcp 4711 &
service=$!
echo serves
status=0
eval "$script" || status=$?
kill $service $avahi $bus
exit $status
