//! Approval of `ringfence pasta` and `slirp4netns` guests (`--ask`): commands and programs at sockets that answer, and a container
//! that tries to answer itself. A virtual machine is asked about in `fronts`.

use crate::support::egress::{CURL, DNSMASQ, LONG, Net};
use crate::support::eventually;
use crate::{net, require};

use super::asking::script;
use super::fronts::{DNS_FORWARD, link_program, policy_inside};

/// Commands that let processes wait for a name as long as a question may take.
fn resolver(server: &str) -> String {
    format!(
        "printf 'nameserver {server}\noptions timeout:30 attempts:1\n' > servers; \
         mount --bind servers /etc/resolv.conf\n"
    )
}

/// Starts a script that connects a namespace, in a user namespace of its own as Podman's.
fn container(net: &Net, script: &str) -> crate::support::Running {
    net.world.host(&["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec", script])
}

#[test]
fn command_is_asked_about_a_container_in_the_background() {
    require!(CURL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    let answer = "case $RINGFENCE_ASK_GUEST/$RINGFENCE_ASK_RULE in netns/other.test:*) echo always;; *) echo deny;; esac";
    script(&net, "ask.sh", answer);
    let steps = format!(
        "touch netns; unshare --net=netns true
         # The session leaves this directory, and standard error.
         ./pasta --config-net --policy p.toml --ask exec:./ask.sh --ask-within 600 -P pid --dns-forward {DNS_FORWARD} \
             -u none -T none -U none --no-map-gw --log-file messages --netns $PWD/netns </dev/null
         {}set +e
         nsenter --net=netns curl -sS --max-time 60 http://other.test/; echo \"other $?\"
         nsenter --net=netns curl -sS --max-time 60 https://b.test/; echo \"b $?\"
         until [ -e listed ]; do sleep 0.05; done
         umount -l netns; rm netns",
        resolver(DNS_FORWARD)
    );
    let running = container(&net, &steps);
    running.wait_for_output("b 6\n");
    let denial = "no rule, and denied when asked for (--ask)";
    assert!(eventually(LONG, || policy_inside(&net, "why netns").contains(denial)));
    std::fs::write(net.world.file("listed"), "").unwrap();
    let output = running.succeed(LONG);
    assert!(output.contains("page\nother 0\n"), "{output}");
    let (log, file) = (net.world.lab.read("messages"), net.world.lab.read("p.toml"));
    for line in ["approved other.test:443 always, in ", "denied b.test:443 for this run\n"] {
        assert!(log.contains(line), "{line}: {log}");
    }
    for rule in ["other.test:443", "other.test:80", "a.test:80,443"] {
        assert!(file.contains(rule), "{rule}: {file}");
    }
    assert!(!net.was_asked_for("b.test"), "a name without an approval left the host");
    net.end();
}

#[test]
fn program_at_a_socket_is_asked_about_a_container_of_slirp4netns() {
    require!(CURL, DNSMASQ);
    let net = net!();
    link_program(&net, "slirp4netns");
    let example = include_str!("../../../../docs/examples/ask.py");
    std::fs::write(net.world.file("ask.py"), example).unwrap();
    let ask = ["python3", "ask.py", "ask.socket", "other.test:443", "other.test:80"];
    // Of root's processes, this one is in the initial user namespace, as a program of the user is with a container of Podman.
    let outside = rustix::process::geteuid().is_root().then(|| net.world.host(&ask));
    let inside = if outside.is_none() { ask.join(" ") + " & asker=$!" } else { "asker=".into() };
    let steps = format!(
        "touch netns; unshare --net=netns true; {inside}
         until [ -S ask.socket ]; do sleep 0.05; done
         ./slirp4netns --disable-host-loopback -c -r 3 --netns-type=path --ask socket:ask.socket --ask-within 600 \
             $PWD/netns tap0 3>ready & slirp=$!; echo $slirp > pid
         until [ -s ready ]; do sleep 0.05; done
         {}set +e
         nsenter --net=netns curl -sS --max-time 60 http://other.test/; echo \"other $?\"
         nsenter --net=netns curl -sS --max-time 60 https://b.test/; echo \"b $?\"
         until [ -e listed ]; do sleep 0.05; done; kill $slirp $asker; wait $slirp",
        resolver("10.0.2.3")
    );
    let running = container(&net, &steps);
    running.wait_for_output("b 6\n");
    let denial = "no rule, and denied when asked for (--ask)";
    assert!(eventually(LONG, || policy_inside(&net, "why netns").contains(denial)));
    std::fs::write(net.world.file("listed"), "").unwrap();
    let output = running.succeed(LONG);
    assert!(output.contains("page\nother 0\n"), "{output}");
    drop(outside.map(crate::support::Running::end));
    net.end();
}

/// Program in a container that approves its own questions.
const LIAR: &str = "
import json, socket
server = socket.socket(socket.AF_UNIX)
server.bind('ask.socket')
server.listen()
print('listens', flush=True)
while True:
    peer = server.accept()[0].makefile('rw')
    for line in peer:
        print('asked', flush=True)
        print(json.dumps({'question': json.loads(line)['question'], 'answer': 'run'}), file=peer, flush=True)";

#[test]
fn container_that_makes_the_socket_of_the_program_answers_nothing() {
    require!(CURL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    std::fs::write(net.world.file("liar.py"), LIAR).unwrap();
    // A container of Podman is in the session's user namespace, and in a PID namespace of its own.
    let steps = format!(
        "touch netns; unshare --net=netns true
         unshare --pid --fork --kill-child python3 liar.py & liar=$!
         until [ -S ask.socket ]; do sleep 0.05; done
         ./pasta --config-net --ask socket:ask.socket --dns-forward {DNS_FORWARD} -u none -T none -U none --no-map-gw \
             --log-file messages --netns $PWD/netns </dev/null
         {}set +e
         nsenter --net=netns curl -sS --max-time 60 http://other.test/; echo \"other $?\"
         kill -9 $liar; umount -l netns; rm netns",
        resolver(DNS_FORWARD)
    );
    let output = container(&net, &steps).succeed(LONG);
    assert!(output.contains("listens\n") && output.contains("other 6\n"), "{output}");
    assert!(!output.contains("asked\n"), "{output}");
    let log = net.world.lab.read("messages");
    assert!(log.contains("of another user or in a container"), "{log}");
    net.end();
}

#[test]
fn command_of_pasta_is_denied_at_once_what_a_terminal_is_asked_for() {
    require!(CURL, DNSMASQ);
    let net = net!();
    link_program(&net, "pasta");
    let script = "set +e; curl -sS --max-time 60 http://other.test/; echo \"other $?\"";
    let options = "./pasta --config-net --ask terminal --ask-within 3600 -- sh -c";
    let finished =
        net.world.host(&options.split(' ').chain([script]).collect::<Vec<_>>()).finish(LONG);
    let output = format!("{}{}", finished.stdout, finished.stderr);
    assert!(finished.stdout.ends_with("other 6\n"), "{output}");
    for line in ["no rule, and nobody to ask (--ask)", "--ask terminal: no terminal"] {
        assert!(output.contains(line), "{line}: {output}");
    }
    let wrong = net.world.host(&["./pasta", "--ask", "sometimes", "--", "true"]).finish(LONG);
    assert!(wrong.status == Some(1) && wrong.stderr.contains("exec:COMMAND"), "{}", wrong.stderr);
    net.end();
}
