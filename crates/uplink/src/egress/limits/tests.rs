use core::time::Duration;

use ringfence_policy::quic::testing::hello;
use ringfence_policy::{Action, PolicySource, RuleSource};

use super::super::datagrams::tests::egress;
use super::*;
use crate::UplinkCounters;
use crate::egress::{Asked, Egress, FirstBytes, FirstVerdict};

const NOW: Duration = Duration::from_secs(1000);

/// Opens a flow to the address of `a.org` and `b.org`.
fn open(egress: &Egress, port: u16, protocol: Protocol) -> Option<Admitted> {
    let to = SocketAddr::from(([203, 0, 113, 1], port));
    match egress.admit(to, None, protocol, false, NOW, &UplinkCounters::default()) {
        Asked::Decided(admitted) => admitted,
        Asked::Held(_) => panic!("nobody is asked"),
    }
}

#[test]
fn connections_beyond_a_limit_are_denied_until_others_end() {
    let egress = egress("a.org:443 at-once=2 connections=3");
    let first = open(&egress, 443, Protocol::Tcp).unwrap();
    let second = open(&egress, 443, Protocol::Udp).unwrap();
    assert!(open(&egress, 443, Protocol::Tcp).is_none(), "two are open");
    drop(first);
    assert!(open(&egress, 443, Protocol::Tcp).is_some());
    drop(second);
    assert!(open(&egress, 443, Protocol::Tcp).is_none(), "it was the third one");
    assert!(open(&egress, 1, Protocol::Tcp).is_some(), "another rule");
}

#[test]
fn flow_ends_and_others_are_denied_once_the_bytes_exceed_their_limit() {
    let egress = egress("a.org:443 bytes=100");
    let [one, other] = [0, 1].map(|_| open(&egress, 443, Protocol::Tcp).unwrap().permit.unwrap());
    assert!(one.carry(60) && other.carry(40) && one.exceeded().is_none());
    assert!(open(&egress, 443, Protocol::Tcp).is_none());
    assert!(!one.carry(1) && !other.carry(0));
    let reason = "limit on bytes of allow a.org:443 bytes=100 ()";
    assert_eq!(other.exceeded().as_deref(), Some(reason));
}

#[test]
fn name_of_the_first_bytes_decides_whose_limit_counts() {
    let egress = egress("a.org:1 connections=1");
    let to = SocketAddr::from(([203, 0, 113, 1], 1));
    let show = |name: &str| {
        let admitted = open(&egress, 1, Protocol::Tcp).unwrap();
        let permit = admitted.permit.clone();
        let mut first = FirstBytes::new(&egress, to, admitted).unwrap();
        let message = hello(name);
        let len = u16::try_from(message.len()).unwrap().to_be_bytes();
        (first.add(&[&[22, 3, 1][..], &len, &message].concat(), false, NOW), permit)
    };
    assert_eq!(show("b.org").0, FirstVerdict::Pass);
    assert_eq!(show("a.org").0, FirstVerdict::Pass);
    assert_eq!(show("b.org").0, FirstVerdict::Pass);
    assert_eq!(show("a.org").0, FirstVerdict::Deny, "its connection was the second one");
    assert_eq!(show("b.org").0, FirstVerdict::Pass);
}

#[test]
fn other_policy_with_the_same_rule_goes_on_counting() {
    let egress = egress("a.org:443 connections=1");
    let replace = |text: &str| {
        let rule =
            RuleSource { action: Action::Allow, text: text.to_owned(), origin: String::new() };
        let source = PolicySource { rules: vec![rule], ..PolicySource::default() };
        egress.replace(Policy::new(source).unwrap());
    };
    assert!(open(&egress, 443, Protocol::Tcp).is_some());
    replace("a.org:443 connections=1");
    assert!(open(&egress, 443, Protocol::Tcp).is_none());
    replace("a.org:443 connections=2");
    replace("a.org:443 connections=1");
    assert!(open(&egress, 443, Protocol::Tcp).is_some(), "the rule was gone");
}
