"""The agent's side: the ``rl_*`` functions, their schemas, the Hermes Agent plugin and the MCP server.

Everything here is a face over what the parts below offer to everyone. An
:class:`~hermes_rl.agent.session.AgentSession` holds what one caller has selected and edited; the ``rl_*``
functions of :mod:`hermes_rl.agent.functions` use one default session.
"""
