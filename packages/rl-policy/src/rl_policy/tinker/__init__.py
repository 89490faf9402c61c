"""A server that the public `tinker` client runs against: several LoRA tenants on one base model.

    client --HTTP--> `server` --> `service`: sessions, order, futures --> `engine` --> Policy
                       |
                     `wire` and `requests`: protobuf and JSON, checked

`rl-policy serve-tinker MODEL` starts it (`command`). Each training client is a set of adapters with
an optimizer state of its own (`Policy.adapter_sets`); its losses are in `losses`, what it saves is
in `store`.
"""
