//! Policies of guests that were started without one, given while they run: of `run`, `pasta`, `slirp4netns` and `passt`.

use crate::support::Running;
use crate::support::egress::{CURL, DNSMASQ, LONG, Net, OPENSSL, OTHER_V4};
use crate::support::needs::Need;
use crate::{net, require};

use super::fronts::{
    DNS_FORWARD, check, check_list_of_denials, link_program, policy_inside, prepare_machine,
    requests,
};
use super::policy::HOLD;

const FIRST: &str = "allow = ['a.test:80,443', 'c.test:443']\n";

/// Commands of a guest. It opens connections, reports their ends once the policy is there, and makes the requests of [`requests`].
fn inside() -> String {
    format!(
        "python3 hold.py a.test other.test; until [ -e asked ]; do sleep 0.05; done
         {}",
        requests()
    )
}

fn prepare(net: &Net) {
    std::fs::write(net.world.file("hold.py"), HOLD).unwrap();
    std::fs::write(net.world.file("first.toml"), FIRST).unwrap();
    std::fs::write(net.world.file("inside.sh"), inside()).unwrap();
}

/// Asserts that a guest with open connections has no policy, gives it one, and checks what holds from then on. `policy` runs
/// `ringfence policy`.
fn give(net: &Net, guest: &Running, name: &str, policy: &dyn Fn(&str) -> String) {
    guest.wait_for_output("open\n");
    let row = |policy: &dyn Fn(&str) -> String| {
        let guests = policy("guests");
        let row = guests.lines().find(|line| line.starts_with(&format!("{name} ")));
        row.unwrap_or_else(|| panic!("{guests}")).to_owned()
    };
    assert!(row(policy).ends_with("  none"), "{}", row(policy));
    assert_eq!(policy(&format!("why {name}")), "nothing was denied\n");
    let set = policy(&format!("set {name} first.toml"));
    assert!(set.contains("2 rules of first.toml"), "{set}");
    assert!(row(policy).ends_with("  2 rules (first.toml)"), "{}", row(policy));
    // Nobody has read which names they show.
    for line in ["a.test reset\n", "other.test reset\n", "other refused\n"] {
        guest.wait_for_output(line);
    }
    std::fs::write(net.world.file("asked"), "").unwrap();
    guest.wait_for_output("shared 35\n");
    check_list_of_denials(|| policy(&format!("why {name}")));
}

#[test]
fn guest_of_run_without_a_policy_gets_one_with_its_records() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    prepare(&net);
    let script = format!(
        ". ./inside.sh; until [ -e watched ]; do sleep 0.05; done
         for i in 1 2 3 4 5; do curl -s --max-time 20 http://{OTHER_V4}:81/ || true; done"
    );
    let guest = net.world.lone_guest("-v --name bare", &script);
    give(&net, &guest, "bare", &|words| net.policy(words));
    check(&net, &guest.stdout.text());
    guest.wait_for_error("denied b.test, no rule; `--allow b.test:443`\n");
    let program = net.world.lab.program().to_owned();
    let listed = net.world.host(&[&program, "ps"]).succeed(LONG);
    let row: Vec<_> = listed.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(row[0] == "bare" && row.contains(&"2"), "{listed}");
    let watch = net.world.host(&[&program, "policy", "watch", "bare"]);
    guest.wait_for_error("verdicts are watched");
    std::fs::write(net.world.file("watched"), "").unwrap();
    guest.succeed(LONG);
    // The last line folds the repetitions, and comes at the end of the guest.
    let verdicts = watch.succeed(LONG);
    assert!(verdicts.contains("\"count\":4"), "{verdicts}");
    net.end();
}

#[test]
fn container_of_pasta_without_a_policy_gets_one_with_its_records() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    prepare(&net);
    let script = format!(
        "touch netns; unshare --net=netns true
         ./pasta --config-net -P pid --dns-forward {DNS_FORWARD} -t none -u none -T none -U none --no-map-gw \
             --log-file messages --netns $PWD/netns </dev/null
         echo nameserver {DNS_FORWARD} > servers; mount --bind servers /etc/resolv.conf
         nsenter --net=netns sh -ec '. ./inside.sh'
         until [ -e listed ]; do nsenter --net=netns curl -s --max-time 20 http://a.test/ >more || :; sleep 0.05; done
         umount -l netns; rm netns
         until grep egress: messages; do sleep 0.05; done"
    );
    let words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", &script];
    let container = net.world.host(&words);
    give(&net, &container, "netns", &|words| policy_inside(&net, words));
    let (pid, program) = (net.world.lab.read("pid"), net.world.lab.program());
    let enter = ["nsenter", "--user", "--preserve-credentials", "--target", pid.trim()];
    let watch = net.world.host(&[&enter[..], &[program, "policy", "watch", "netns"]].concat());
    watch.wait_for_output(r#""verdict":"allow","name":"a.test""#);
    std::fs::write(net.world.file("listed"), "").unwrap();
    let output = container.succeed(LONG);
    check(&net, &output);
    let log = net.world.lab.read("messages");
    assert!(log.contains("denied b.test, no rule; `--allow b.test:443`\n"), "{log}");
    watch.succeed(LONG);
    net.end();
}

#[test]
fn container_of_slirp4netns_without_a_policy_gets_one() {
    require!(CURL, OPENSSL, DNSMASQ);
    let net = net!();
    link_program(&net, "slirp4netns");
    prepare(&net);
    let script = "touch netns; unshare --net=netns true
         ./slirp4netns --disable-host-loopback -c -r 3 --netns-type=path $PWD/netns tap0 3>ready & slirp=$!; echo $slirp > pid
         until [ -s ready ]; do sleep 0.05; done
         echo nameserver 10.0.2.3 > servers; mount --bind servers /etc/resolv.conf
         nsenter --net=netns sh -ec '. ./inside.sh'
         until [ -e listed ]; do sleep 0.05; done; kill $slirp; wait $slirp";
    let words = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script];
    let container = net.world.host(&words);
    give(&net, &container, "netns", &|words| policy_inside(&net, words));
    std::fs::write(net.world.file("listed"), "").unwrap();
    check(&net, &container.succeed(LONG));
    net.end();
}

#[test]
fn virtual_machine_without_a_policy_gets_one() {
    require!(CURL, OPENSSL, DNSMASQ, Need::Program("busybox", "busybox"));
    let net = net!();
    link_program(&net, "passt");
    prepare(&net);
    prepare_machine(&net);
    let front = net.world.host(&["./passt", "--one-off", "--foreground", "-s", "vm.socket"]);
    front.wait_for_error("listens at");
    let script = "ip link set eth0 up; busybox udhcpc -i eth0 -n -q -f -s ./on-lease 2>/dev/null
         . ./inside.sh; until [ -e listed ]; do sleep 0.05; done";
    let machine = net.world.host(&["python3", "machine.py", "vm.socket", script]);
    give(&net, &machine, "vm.socket", &|words| net.policy(words));
    std::fs::write(net.world.file("listed"), "").unwrap();
    check(&net, &machine.succeed(LONG));
    let finished = front.finish(LONG);
    assert!(finished.stderr.contains("passt: egress: "), "{}", finished.stderr);
    net.end();
}
